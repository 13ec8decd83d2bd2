#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/id_vector.h"
#include "model/run/pass_order.h"

namespace tessera {

/// Indices into the lists of one StepPlan.
enum class TaskId : int32_t {};
enum class BufferId : int32_t {};
enum class StorageId : int32_t {};
enum class LaneId : int32_t {};

/// What works side by side: on CUDA a stream, on the CPU the order in which one thread starts and
/// polls.
enum class LaneKind : uint8_t {
  kCompute,
  kGroup,     ///< a communication group's exchanges, which all its ranks start in the same order
  kMessages,  ///< messages between neighbours of a group, which arrive in the order of their sends
  kCopiesIn,
  kCopiesOut,
  kOptimizer,
  kHost,
  kStores,       ///< of what is offloaded, to the host's memory
  kReloads,      ///< back from there
  kHostUpdates,  ///< the host's threads, at work on optimizer state
};

struct Lane {
  LaneKind kind = LaneKind::kCompute;
  std::string name;                 ///< of a group: the communicator's
  std::vector<int64_t> ranks = {};  ///< of a group: its members in the world, in their order
};

enum class Home : uint8_t { kDevice, kHost };

/// What memory is for: the rows of a report.
enum class Purpose : uint8_t {
  kSaved,      ///< from a forward to a backward pass
  kHidden,     ///< streams between layers, and their gradients
  kWorking,    ///< one program's transients
  kInputs,     ///< token ids, labels, results of a micro-batch
  kGathered,   ///< weights of a module, whole while it is used
  kReduced,    ///< gradients of a module, until they are reduced
  kOffloaded,  ///< what of the saved values waits in the host's memory
  kStashed,    ///< pages of rows that came to experts, from a forward to a backward pass
  kState,      ///< weights, gradients and optimizer state that stay
};
std::string_view purpose_name(Purpose purpose);

/// Memory as it is taken today: what one piece of it holds changes in the course of a step.
struct StepStorage {
  std::string name;
  int64_t bytes = 0;
  Purpose purpose = Purpose::kState;
  Home home = Home::kDevice;
  /// In the buffer that storages of its purpose share; without one it has memory of its own.
  std::optional<int64_t> offset = std::nullopt;
};

/// One value, from its first writer to its last reader.
struct StepBuffer {
  std::string name;  ///< "saved, layer 7, micro-batch 3"
  int64_t bytes = 0;
  StorageId storage = {};
  bool outlives = false;  ///< it has a value before the step and leaves one behind it
};

enum class TaskKind : uint8_t { kRun, kSend, kReceive, kExchange, kCopy, kOptimizer, kHost };
std::string_view task_kind_name(TaskKind kind);

/// A task is done when the next begins (kWhole), or is started by one task and waited for by
/// another; in between, its buffers are in use.
enum class TaskPhase : uint8_t { kWhole, kStart, kWait };

/// What the interpreter does for a task.
enum class TaskAction : uint8_t {
  kBegin,            ///< gradients hold nothing; the step's micro-batches are read
  kLoadInputs,       ///< a micro-batch's ids, labels and scales go to the device
  kRunProgram,       ///< TaskSubject::program
  kSumBalance,       ///< one balance loss over the whole model: the layers' sums go to the host
  kPublish,          ///< a micro-batch's results are copied out
  kStore,            ///< what is offloaded of layer TaskSubject::unit of a chunk goes to the host
  kReload,           ///< and comes back
  kForwardMessage,   ///< between stages: TaskSubject::stream of ChunkRun::forward_messages()
  kBackwardMessage,  ///< likewise
  kCollect,          ///< the host reads the results of all micro-batches
  kCollectLosses,    ///< of an evaluation, which changes nothing else
  kShareResults,     ///< of all ranks together
  kPrepareUpdate,    ///< where gradients are released: what the updates are to be
  kLoadState,        ///< a bucket's optimizer state comes from the host's memory
  kStoreState,       ///< and goes back
  kStoreGradients,   ///< a bucket's gradients go to the host, which updates, started with kUpdate,
  kLoadWeights,      ///< and its new weights come from there
  kRoundGradients,   ///< what a program added up is added to gradients in fewer bits
  kReduceBucket,     ///< gradients of a bucket are summed into its owners' rows
  kFinishGradients,  ///< all of them are there
  kGatherBucket,     ///< a bucket's updated weights go to all replicas
  kGatherModule,     ///< full sharding: a module's weights become whole
  kReduceModule,     ///< full sharding: a module's gradients are summed into the shares
  kSumReplicas,      ///< hybrid sharding: the shares' gradients are summed over the copies
  kJudge,            ///< global norm, clip factor, and whether the step updates; started, the
                     ///< device decides, and waited for, the host knows
  kUpdate,           ///< AdamW on a bucket, or on all that this rank holds; where the device
                     ///< judged, it does nothing in a step that is skipped; gradients that are
                     ///< released are completed and judged bucket by bucket
  kEnd,              ///< what follows an update on the host
};

/// What a task is about, as far as it applies; -1 where it does not.
struct TaskSubject {
  ProgramRef program = {};
  RunPart part = {};   ///< of the program's run
  int64_t chunk = -1;  ///< of this rank
  int64_t place = -1;  ///< among the micro-batches of the chunk that are held at a time
  int64_t micro_batch = -1;
  int64_t stream = -1;  ///< of a message
  int64_t peer = -1;    ///< of a message: the other rank's place in the group
  int64_t unit = -1;    ///< a bucket, a module, or a layer of the chunk
};

/// Exchanges inside of a program's run.
struct InnerExchanges {
  LaneId lane = {};
  int64_t count = 0;
  int64_t bytes = 0;  ///< of their inputs, at their bounds
};

struct Task {
  TaskKind kind = TaskKind::kHost;
  TaskPhase phase = TaskPhase::kWhole;
  TaskAction action = TaskAction::kBegin;
  LaneId lane = {};
  std::string name;  ///< "backward, layer 7, micro-batch 3"
  std::vector<BufferId> reads = {};
  std::vector<BufferId> writes = {};  ///< what is added to is both read and written
  std::vector<TaskId> after = {};     ///< dependencies that no buffer shows
  double flops = 0;
  int64_t bytes = 0;  ///< through memory; of messages and exchanges: what this rank sends
  TaskSubject subject = {};
  std::optional<TaskId> started_by = std::nullopt;  ///< of a wait
  std::vector<InnerExchanges> inside = {};          ///< of a run
  bool only_on_update = false;                      ///< left out where the step is skipped
};

/// What one rank does in a step, in a straight list that is right when it is run from the first to
/// the last. Plain data: built by build_step, proved by check_plan, run by StepRunner, printed by
/// print_plan. A wait in front of its start is for what the step before it started.
struct StepPlan {
  int64_t rank = 0;
  IdVector<LaneId, Lane> lanes;
  IdVector<StorageId, StepStorage> storages;
  IdVector<BufferId, StepBuffer> buffers;
  IdVector<TaskId, Task> tasks;

  Purpose purpose(BufferId id) const { return storages[buffers[id].storage].purpose; }
};

/// For each start the task that waits for it. Throws InternalError as check_plan where one is
/// missing.
IdVector<TaskId, std::optional<TaskId>> find_waits(const StepPlan& plan);

/// For each task those that must come before it, ascending: its `after`; the start of what it waits
/// for; who last wrote what it reads or writes, and who read what it overwrites, also where that
/// was another buffer in the same storage. Any order that keeps these gives the same bits. Waits in
/// front of their start have none on it.
IdVector<TaskId, std::vector<TaskId>> find_dependencies(const StepPlan& plan);

/// The tasks in which a buffer must be in memory: from its first writer to its last reader, those
/// of an exchange counting up to its wait. Those that outlive the step live from the first task to
/// the last.
struct BufferLife {
  TaskId first = {};
  TaskId last = {};
};
IdVector<BufferId, BufferLife> find_lives(const StepPlan& plan);

}  // namespace tessera
