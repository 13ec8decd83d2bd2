#include "comm/staged_world.h"

#include "comm/rows.h"
#include "core/host_tensor.h"

namespace tessera {
namespace {

using Rows = std::span<const int64_t>;

/// The first rows, those that an operation moves.
Tensor first_rows(Tensor tensor, int64_t num_rows) {
  tensor.shape[0] = num_rows;
  return tensor;
}

/// An operation of the host with what it reads and writes.
class StagedWork final : public Work {
 public:
  StagedWork(HostTensor in, HostTensor out) : in_(std::move(in)), out_(std::move(out)) {}

  /// Calls start(in, out), which begins the operation, with tensors of the host.
  template <typename Start>
  void start(const Start& start) {
    pending_ = start(in_.get(), out_.get());
  }
  void wait() override {
    pending_.wait();
    out_.store();
  }
  bool done() override { return pending_.done(); }
  /// The destructor of pending_, which follows, abandons the operation.
  void abandon() noexcept override {}

 private:
  HostTensor in_;
  HostTensor out_;
  Pending pending_;  // last, so that it ends before its tensors
};

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(CommunicatorPtr host, std::shared_ptr<CommStatistics> statistics)
      : Communicator(host->name(), host->ranks(), host->rank(), std::move(statistics)),
        host_(std::move(host)) {}

  void connect_neighbours() override { host_->connect_neighbours(); }

 private:
  Pending do_all_gather_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return exchange(
        first_rows(in, own(rows)), first_rows(out, sum_rows(rows)),
        [&](const Tensor& from, const Tensor& to) { return host_->all_gather_v(from, to, rows); });
  }
  Pending do_reduce_scatter_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return exchange(first_rows(in, sum_rows(rows)), first_rows(out, own(rows)),
                    [&](const Tensor& from, const Tensor& to) {
                      return host_->reduce_scatter_v(from, to, rows);
                    });
  }
  Pending do_all_reduce(const Tensor& in, const Tensor& out, ReduceOp op) override {
    return exchange(in, out, [&](const Tensor& from, const Tensor& to) {
      return host_->all_reduce(from, to, op);
    });
  }
  Pending do_all_to_all_v(const Tensor& in, const Tensor& out, Rows send_rows,
                          Rows receive_rows) override {
    return exchange(first_rows(in, sum_rows(send_rows)), first_rows(out, sum_rows(receive_rows)),
                    [&](const Tensor& from, const Tensor& to) {
                      return host_->all_to_all_v(from, to, send_rows, receive_rows);
                    });
  }
  Pending do_send(const Tensor& tensor, int64_t to) override {
    return exchange(tensor, {}, [&](const Tensor& from, const Tensor& /*out*/) {
      return host_->send(from, to);
    });
  }
  Pending do_receive(const Tensor& tensor, int64_t from) override {
    return exchange({}, tensor, [&](const Tensor& /*in*/, const Tensor& to) {
      return host_->receive(to, from);
    });
  }
  Pending do_broadcast(const Tensor& tensor, int64_t root) override {
    if (rank() == root)
      return exchange(tensor, {}, [&](const Tensor& from, const Tensor& /*out*/) {
        return host_->broadcast(from, root);
      });
    return exchange({}, tensor, [&](const Tensor& /*in*/, const Tensor& to) {
      return host_->broadcast(to, root);
    });
  }
  void do_barrier() override { host_->barrier(); }

  int64_t own(Rows rows) const { return rows[rank()]; }
  template <typename Start>
  static Pending exchange(const Tensor& in, const Tensor& out, const Start& start) {
    auto work = std::make_unique<StagedWork>(HostTensor(in, HostTensor::Access::kRead),
                                             HostTensor(out, HostTensor::Access::kWrite));
    work->start(start);
    return Pending(std::move(work));
  }

  CommunicatorPtr host_;
};

class StagedWorld final : public World {
 public:
  explicit StagedWorld(World& host) : host_(host) {}

  int64_t rank() const override { return host_.rank(); }
  int64_t size() const override { return host_.size(); }
  CommunicatorPtr make_group(const std::string& name, const std::vector<int64_t>& ranks) override {
    CommunicatorPtr host = host_.make_group(name, ranks);
    if (ranks.size() == 1) return make_single_communicator(name, rank(), statistics_);
    return std::make_shared<StagedCommunicator>(std::move(host), statistics_);
  }
  const CommStatistics& statistics() const override { return *statistics_; }
  CommStatistics& statistics() override { return *statistics_; }
  bool ending() override { return host_.ending(); }

 private:
  void end_others(int exit_code) override { host_.abort(exit_code); }

  World& host_;
  std::shared_ptr<CommStatistics> statistics_ = std::make_shared<CommStatistics>();
};

}  // namespace

std::unique_ptr<World> make_staged_world(World& host) {
  return std::make_unique<StagedWorld>(host);
}

}  // namespace tessera
