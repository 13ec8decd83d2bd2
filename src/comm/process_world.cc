#include "comm/process_world.h"

#include "comm/engine.h"
#include "comm/gather_value.h"
#include "core/memory.h"

namespace tessera {
namespace {

using Rows = std::span<const int64_t>;

class EngineWork : public Work {
 public:
  EngineWork(std::shared_ptr<CommEngine> engine, std::shared_ptr<Operation> operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}

  void wait() override { engine_->wait(*operation_); }
  bool done() override { return engine_->test(*operation_); }
  void abandon() noexcept override {
    if (!operation_->done()) engine_->give_up("this rank gave up an operation");
  }

 private:
  std::shared_ptr<CommEngine> engine_;
  std::shared_ptr<Operation> operation_;
};

class ProcessCommunicator : public Communicator {
 public:
  ProcessCommunicator(std::shared_ptr<CommEngine> engine, std::shared_ptr<ProcessGroup> group,
                      std::shared_ptr<CommStatistics> statistics)
      : Communicator(group->name, group->ranks, group->rank, std::move(statistics)),
        engine_(std::move(engine)),
        group_(std::move(group)),
        num_sent_(group_->ranks.size()),
        num_received_(group_->ranks.size()) {}

 private:
  Pending do_all_gather_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return collective(CommKind::kAllGather, all_gather_schedule(place(), in, out, rows));
  }
  Pending do_reduce_scatter_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return collective(CommKind::kReduceScatter,
                      reduce_scatter_schedule(place(), in, out, rows, engine_->scratch()));
  }
  Pending do_all_reduce(const Tensor& in, const Tensor& out, ReduceOp op) override {
    return collective(CommKind::kAllReduce,
                      all_reduce_schedule(place(), in, out, op, engine_->scratch()));
  }
  Pending do_all_to_all_v(const Tensor& in, const Tensor& out, Rows send_rows,
                          Rows receive_rows) override {
    return collective(CommKind::kAllToAll,
                      all_to_all_schedule(place(), in, out, send_rows, receive_rows));
  }
  Pending do_all_gather_moves(RowMoves moves, Rows rows) override {
    std::vector<Schedule> all;
    for (const auto& [in, out] : moves) all.push_back(all_gather_schedule(place(), in, out, rows));
    return collective(CommKind::kAllGather, joint_schedule(std::move(all)));
  }
  Pending do_all_to_all_moves(RowMoves moves, Rows send_rows, Rows receive_rows) override {
    std::vector<Schedule> all;
    for (const auto& [in, out] : moves)
      all.push_back(all_to_all_schedule(place(), in, out, send_rows, receive_rows));
    return collective(CommKind::kAllToAll, joint_schedule(std::move(all)));
  }
  Pending do_send(const Tensor& tensor, int64_t to) override {
    return start(CommKind::kSend, num_sent_[to]++, message_schedule(true, to, tensor));
  }
  Pending do_receive(const Tensor& tensor, int64_t from) override {
    return start(CommKind::kReceive, num_received_[from]++, message_schedule(false, from, tensor));
  }
  Pending do_broadcast(const Tensor& tensor, int64_t root) override {
    return collective(CommKind::kBroadcast, broadcast_schedule(place(), tensor, root));
  }
  void do_barrier() override { collective(CommKind::kBarrier, barrier_schedule(place())).wait(); }

  Place place() const { return {rank(), size()}; }
  Pending collective(CommKind kind, Schedule schedule) {
    return start(kind, num_collectives_++, std::move(schedule));
  }
  Pending start(CommKind kind, int64_t number, Schedule schedule) {
    auto operation = std::make_shared<Operation>(group_, kind, number, std::move(schedule));
    auto work = std::make_unique<EngineWork>(engine_, operation);
    engine_->start(std::move(operation));
    return Pending(std::move(work));
  }

  std::shared_ptr<CommEngine> engine_;
  std::shared_ptr<ProcessGroup> group_;
  int64_t num_collectives_ = 0;
  std::vector<int64_t> num_sent_;      ///< by receiver
  std::vector<int64_t> num_received_;  ///< by sender
};

class ProcessWorld : public World {
 public:
  explicit ProcessWorld(std::shared_ptr<CommEngine> engine) : engine_(std::move(engine)) {}

  int64_t rank() const override { return engine_->transport().rank(); }
  int64_t size() const override { return engine_->transport().size(); }
  CommunicatorPtr make_group(const std::string& name, const std::vector<int64_t>& ranks) override {
    const int64_t place = place_in_group(name, ranks);
    if (ranks.size() == 1) return make_single_communicator(name, rank(), statistics_);
    return std::make_shared<ProcessCommunicator>(engine_, join(name, ranks, place), statistics_);
  }
  const CommStatistics& statistics() const override { return *statistics_; }
  CommStatistics& statistics() override { return *statistics_; }
  bool ending() override { return engine_->job_ending(); }

  /// Tells the engine where the others run.
  void exchange_process_names();

 private:
  std::shared_ptr<ProcessGroup> join(const std::string& name, const std::vector<int64_t>& ranks,
                                     int64_t place) {
    auto group = std::make_shared<ProcessGroup>();
    group->name = name;
    group->ranks = ranks;
    group->rank = place;
    group->channel = engine_->transport().make_channel(name, ranks);
    return group;
  }

  void end_others(int exit_code) override { engine_->transport().abort(exit_code); }

  std::shared_ptr<CommEngine> engine_;
  std::shared_ptr<CommStatistics> statistics_ = std::make_shared<CommStatistics>();
};

void ProcessWorld::exchange_process_names() {
  const std::vector<ProcessName> names =
      gather_value(*make_world_group(), ProcessName::of_this_process());
  statistics_->clear();
  engine_->watch(names);
}

}  // namespace

std::unique_ptr<World> make_process_world(std::shared_ptr<Transport> transport,
                                          const CommOptions& options, bool owns_process) {
  auto termination = owns_process ? std::make_unique<Termination>() : nullptr;
  auto world = std::make_unique<ProcessWorld>(
      std::make_shared<CommEngine>(std::move(transport), std::move(termination), options));
  world->exchange_process_names();
  return world;
}

}  // namespace tessera
