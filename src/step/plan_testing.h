#pragma once

#include <string>
#include <vector>

#include "step/step_plan.h"

/// Small plans written by hand.
namespace tessera::testing {

/// Two ranks of a pipeline: the first computes and sends, the second receives and computes; then
/// both sum something. Tests break copies of it.
inline StepPlan small_plan(int64_t rank) {
  StepPlan plan;
  plan.rank = rank;
  const LaneId compute = plan.lanes.add({LaneKind::kCompute, "compute"});
  const LaneId messages = plan.lanes.add({LaneKind::kMessages, "pp", {0, 1}});
  const LaneId sums = plan.lanes.add({LaneKind::kGroup, "dp", {0, 1}});
  const StorageId stream = plan.storages.add({"stream", 64, Purpose::kHidden});
  const StorageId weights = plan.storages.add({"gradients", 128});
  const BufferId hidden = plan.buffers.add({"hidden", 64, stream});
  const BufferId gradients = plan.buffers.add({"gradients", 128, weights, true});

  const auto run = [&](const std::string& name, std::vector<BufferId> reads,
                       std::vector<BufferId> writes) {
    return plan.tasks.add({.kind = TaskKind::kRun,
                           .action = TaskAction::kRunProgram,
                           .lane = compute,
                           .name = name,
                           .reads = std::move(reads),
                           .writes = std::move(writes),
                           .flops = 2e9,
                           .bytes = 2048});
  };
  const auto start = [&](TaskKind kind, LaneId lane, const std::string& name,
                         std::vector<BufferId> reads, std::vector<BufferId> writes) {
    return plan.tasks.add({.kind = kind,
                           .phase = TaskPhase::kStart,
                           .action = TaskAction::kForwardMessage,
                           .lane = lane,
                           .name = name,
                           .reads = std::move(reads),
                           .writes = std::move(writes),
                           .bytes = 64,
                           .subject = {.micro_batch = 0, .stream = 0, .peer = 1 - rank}});
  };
  const auto wait = [&](TaskId id) {
    Task task = plan.tasks[id];
    task.phase = TaskPhase::kWait;
    task.name = "wait: " + task.name;
    task.bytes = 0;
    task.started_by = id;
    return plan.tasks.add(std::move(task));
  };
  if (rank == 0) {
    run("forward", {}, {hidden});
    const TaskId send = start(TaskKind::kSend, messages, "send hidden", {hidden}, {});
    const TaskId sum = start(TaskKind::kExchange, sums, "sum", {gradients}, {gradients});
    wait(send);
    wait(sum);
  } else {
    wait(start(TaskKind::kReceive, messages, "receive hidden", {}, {hidden}));
    run("forward", {hidden, gradients}, {gradients});
    wait(start(TaskKind::kExchange, sums, "sum", {gradients}, {gradients}));
  }
  return plan;
}

}  // namespace tessera::testing
