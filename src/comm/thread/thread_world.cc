#include "comm/thread/thread_world.h"

#include <omp.h>

#include <algorithm>
#include <thread>

#include "comm/error.h"
#include "comm/thread/thread_hub.h"

namespace tessera {
namespace {

using Rows = std::span<const int64_t>;

class ThreadWork : public Work {
 public:
  ThreadWork(std::shared_ptr<ThreadHub> hub, std::shared_ptr<ThreadGroup> group, int64_t rank,
             ThreadOperationPtr operation)
      : hub_(std::move(hub)),
        group_(std::move(group)),
        rank_(rank),
        operation_(std::move(operation)) {}

  void wait() override { hub_->wait(*group_, rank_, *operation_); }
  bool done() override { return hub_->done(*operation_); }
  void abandon() noexcept override { hub_->abandon(group_->ranks[rank_], *operation_); }

 private:
  std::shared_ptr<ThreadHub> hub_;
  std::shared_ptr<ThreadGroup> group_;
  int64_t rank_;
  ThreadOperationPtr operation_;
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadHub> hub, std::shared_ptr<ThreadGroup> group,
                     int64_t rank, std::shared_ptr<CommStatistics> statistics)
      : Communicator(group->name, group->ranks, rank, std::move(statistics)),
        hub_(std::move(hub)),
        group_(std::move(group)) {}

 private:
  Pending do_all_gather_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return start(CommKind::kAllGather, {.in = in, .out = out, .rows = {rows.begin(), rows.end()}});
  }
  Pending do_reduce_scatter_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return start(CommKind::kReduceScatter,
                 {.in = in, .out = out, .rows = {rows.begin(), rows.end()}});
  }
  Pending do_all_reduce(const Tensor& in, const Tensor& out, ReduceOp op) override {
    return start(CommKind::kAllReduce, {.in = in, .out = out, .op = op});
  }
  Pending do_all_to_all_v(const Tensor& in, const Tensor& out, Rows send_rows,
                          Rows receive_rows) override {
    return start(CommKind::kAllToAll, {.in = in,
                                       .out = out,
                                       .rows = {send_rows.begin(), send_rows.end()},
                                       .receive_rows = {receive_rows.begin(), receive_rows.end()}});
  }
  Pending do_send(const Tensor& tensor, int64_t to) override {
    return pending(hub_->message(*group_, rank(), to, true, tensor));
  }
  Pending do_receive(const Tensor& tensor, int64_t from) override {
    return pending(hub_->message(*group_, from, rank(), false, tensor));
  }
  Pending do_broadcast(const Tensor& tensor, int64_t root) override {
    return start(CommKind::kBroadcast, {.in = tensor, .root = root});
  }
  void do_barrier() override { start(CommKind::kBarrier, {}).wait(); }

  Pending start(CommKind kind, ThreadPost post) {
    return pending(hub_->collective(*group_, kind, num_started_++, rank(), std::move(post)));
  }
  Pending pending(ThreadOperationPtr operation) {
    return Pending(std::make_unique<ThreadWork>(hub_, group_, rank(), std::move(operation)));
  }

  std::shared_ptr<ThreadHub> hub_;
  std::shared_ptr<ThreadGroup> group_;
  int64_t num_started_ = 0;
};

class ThreadWorld : public World {
 public:
  ThreadWorld(std::shared_ptr<ThreadHub> hub, int64_t rank) : hub_(std::move(hub)), rank_(rank) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return hub_->num_ranks(); }
  CommunicatorPtr make_group(const std::string& name, const std::vector<int64_t>& ranks) override {
    const int64_t place = place_in_group(name, ranks);
    if (ranks.size() == 1) return make_single_communicator(name, rank_, statistics_);
    const int64_t instance = num_groups_[{name, ranks}]++;
    return std::make_shared<ThreadCommunicator>(hub_, hub_->group(name, ranks, instance), place,
                                                statistics_);
  }
  const CommStatistics& statistics() const override { return *statistics_; }
  CommStatistics& statistics() override { return *statistics_; }
  bool ending() override { return hub_->failure() != nullptr; }

 private:
  std::shared_ptr<ThreadHub> hub_;
  int64_t rank_;
  std::map<std::pair<std::string, std::vector<int64_t>>, int64_t> num_groups_;
  std::shared_ptr<CommStatistics> statistics_ = std::make_shared<CommStatistics>();
};

void run_rank(const std::shared_ptr<ThreadHub>& hub, int64_t rank, int num_threads,
              const std::function<void(World&)>& body) {
  omp_set_num_threads(num_threads);
  try {
    ThreadWorld world(hub, rank);
    body(world);
  } catch (...) {
    hub->fail(rank, std::current_exception());
  }
}

}  // namespace

void run_thread_world(int64_t num_ranks, const std::function<void(World&)>& body,
                      const CommOptions& options) {
  ensure(num_ranks > 0, "a world of {} ranks", num_ranks);
  const auto hub = std::make_shared<ThreadHub>(num_ranks, options);
  const int num_threads = static_cast<int>(std::max<int64_t>(1, omp_get_max_threads() / num_ranks));
  std::vector<std::jthread> threads;
  for (int64_t rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank] { run_rank(hub, rank, num_threads, body); });
  for (std::jthread& thread : threads) thread.join();
  if (const auto failure = hub->failure()) std::rethrow_exception(failure);
}

}  // namespace tessera
