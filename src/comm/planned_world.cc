#include "comm/planned_world.h"

#include <algorithm>

namespace tessera {
namespace {

class PlannedCommunicator final : public Communicator {
 public:
  PlannedCommunicator(const std::string& name, const std::vector<int64_t>& ranks, int64_t rank,
                      std::shared_ptr<CommStatistics> statistics)
      : Communicator(name, ranks, rank, std::move(statistics)) {}

 private:
  [[noreturn]] void refuse() const {
    throw InternalError(
        fmt::format("group '{}' is planned only: nothing is there to answer", name()));
  }
  Pending do_all_gather_v(const Tensor&, const Tensor&, std::span<const int64_t>) override {
    refuse();
  }
  Pending do_reduce_scatter_v(const Tensor&, const Tensor&, std::span<const int64_t>) override {
    refuse();
  }
  Pending do_all_reduce(const Tensor&, const Tensor&, ReduceOp) override { refuse(); }
  Pending do_all_to_all_v(const Tensor&, const Tensor&, std::span<const int64_t>,
                          std::span<const int64_t>) override {
    refuse();
  }
  Pending do_send(const Tensor&, int64_t) override { refuse(); }
  Pending do_receive(const Tensor&, int64_t) override { refuse(); }
  Pending do_broadcast(const Tensor&, int64_t) override { refuse(); }
  void do_barrier() override { refuse(); }
};

class PlannedWorld final : public World {
 public:
  PlannedWorld(int64_t rank, int64_t size) : rank_(rank), size_(size) {
    ensure(rank >= 0 && rank < size, "planned rank {} of {}", rank, size);
  }

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  CommunicatorPtr make_group(const std::string& name, const std::vector<int64_t>& ranks) override {
    const auto place = std::ranges::find(ranks, rank_);
    ensure(place != ranks.end(), "group '{}' does not hold rank {}", name, rank_);
    return std::make_shared<PlannedCommunicator>(name, ranks, place - ranks.begin(), statistics_);
  }
  const CommStatistics& statistics() const override { return *statistics_; }
  CommStatistics& statistics() override { return *statistics_; }

 private:
  int64_t rank_;
  int64_t size_;
  std::shared_ptr<CommStatistics> statistics_ = std::make_shared<CommStatistics>();
};

}  // namespace

std::unique_ptr<World> make_planned_world(int64_t rank, int64_t size) {
  return std::make_unique<PlannedWorld>(rank, size);
}

}  // namespace tessera
