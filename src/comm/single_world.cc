#include "comm/communicator.h"

namespace tessera {
namespace {

/// A group of one rank: the base class answers all but messages, for which there is no peer.
class SingleCommunicator : public Communicator {
 public:
  SingleCommunicator(const std::string& name, int64_t rank,
                     std::shared_ptr<CommStatistics> statistics)
      : Communicator(name, {rank}, 0, std::move(statistics)) {}

 private:
  Pending do_all_gather_v(const Tensor&, const Tensor&, std::span<const int64_t>) override {
    return no_peer();
  }
  Pending do_reduce_scatter_v(const Tensor&, const Tensor&, std::span<const int64_t>) override {
    return no_peer();
  }
  Pending do_all_reduce(const Tensor&, const Tensor&, ReduceOp) override { return no_peer(); }
  Pending do_all_to_all_v(const Tensor&, const Tensor&, std::span<const int64_t>,
                          std::span<const int64_t>) override {
    return no_peer();
  }
  Pending do_send(const Tensor&, int64_t) override { return no_peer(); }
  Pending do_receive(const Tensor&, int64_t) override { return no_peer(); }
  Pending do_broadcast(const Tensor&, int64_t) override { return no_peer(); }
  void do_barrier() override { no_peer().wait(); }

  Pending no_peer() const { throw InternalError("group " + name() + " of one rank has no peers"); }
};

class SingleWorld : public World {
 public:
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 1; }
  CommunicatorPtr make_group(const std::string& name, const std::vector<int64_t>& ranks) override {
    place_in_group(name, ranks);
    return make_single_communicator(name, 0, statistics_);
  }
  const CommStatistics& statistics() const override { return *statistics_; }
  CommStatistics& statistics() override { return *statistics_; }

 private:
  std::shared_ptr<CommStatistics> statistics_ = std::make_shared<CommStatistics>();
};

}  // namespace

CommunicatorPtr make_single_communicator(const std::string& name, int64_t rank,
                                         std::shared_ptr<CommStatistics> statistics) {
  return std::make_shared<SingleCommunicator>(name, rank, std::move(statistics));
}

CommunicatorPtr make_single_communicator(const std::string& name) {
  return make_single_communicator(name, 0, std::make_shared<CommStatistics>());
}

std::unique_ptr<World> make_single_world() {
  return std::make_unique<SingleWorld>();
}

}  // namespace tessera
