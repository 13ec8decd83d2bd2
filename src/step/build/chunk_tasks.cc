#include "step/build/chunk_tasks.h"

#include <map>
#include <span>

#include "model/batch/batch_inputs.h"
#include "model/batch/model_balance.h"
#include "model/run/stash_pool.h"
#include "step/build/node_types.h"

namespace tessera {
namespace {

using enum ProgramPart;
using enum PassDirection;

int64_t input_bytes(const Program& program, const Node& node) {
  int64_t bytes = 0;
  for (const ValueId input : node.inputs) bytes += program.type(input).num_bytes();
  return bytes;
}

}  // namespace

ChunkTasks::ChunkTasks(PlanWriter& writer, const StagePrograms& programs,
                       const SavedPlacement* placement, int64_t chunk)
    : writer_(writer),
      programs_(programs),
      placement_(placement),
      chunk_(programs.part.chunks.at(chunk)),
      idx_(chunk),
      streams_(programs, chunk_),
      balances_model_(balances_whole_model(programs.config)) {
  if (placement == nullptr) return;
  for (const LayerOffload& offload : placement->offloads) {
    if (offload.chunk == chunk) offloads_.emplace(offload.layer, offload.micro_batch);
  }
}

BufferId ChunkTasks::make(const std::string& what, const Holder& holder, const std::string& storage,
                          int64_t bytes, Purpose purpose, Home home,
                          std::optional<int64_t> offset) {
  return writer_.buffer(fmt::format("{}, chunk {}, micro-batch {}", what, idx_, holder.micro_batch),
                        bytes,
                        {.name = fmt::format("{}, chunk {}, place {}", storage, idx_, holder.place),
                         .bytes = bytes,
                         .purpose = purpose,
                         .home = home,
                         .offset = offset});
}

BufferId ChunkTasks::make_saved(const std::string& what, const StepRun& run, int64_t bytes,
                                std::vector<int64_t> SavedOffsets::*offsets) {
  std::optional<int64_t> offset;
  if (placement_ != nullptr) {
    const SavedOffsets& own = placement_->offsets[idx_][run.place];
    offset = (own.*offsets).at(run.ref.idx);
  }
  return make(what, {run.micro_batch, run.place}, what, bytes, Purpose::kSaved, Home::kDevice,
              offset);
}

BufferId ChunkTasks::stream(const std::string& what, int64_t storage, const Holder& holder) {
  return make(what, holder, fmt::format("stream {}", storage), programs_.hidden_bytes(),
              Purpose::kHidden);
}

BufferId ChunkTasks::hidden(int64_t idx, const Holder& holder) {
  return stream(fmt::format("hidden states {}", idx), streams_.hidden(idx), holder);
}

BufferId ChunkTasks::gradient(int64_t idx, const Holder& holder) {
  return stream(fmt::format("gradient {}", idx), streams_.grad(idx), holder);
}

BufferId ChunkTasks::outside_gradient(int64_t depth, const Holder& holder) {
  const int64_t idx = streams_.decoder + depth;
  const int64_t storage = streams_.grad_from_outside(depth);
  if (storage == streams_.grad(idx)) return gradient(idx, holder);
  return stream(fmt::format("gradient {} from outside", idx), storage, holder);
}

BufferId ChunkTasks::embedded(int64_t mtp, const Holder& holder) {
  return stream(fmt::format("embeddings {}", mtp), streams_.embedded(mtp), holder);
}

BufferId ChunkTasks::embedded_gradient(int64_t mtp, const Holder& holder) {
  return stream(fmt::format("gradient of embeddings {}", mtp), streams_.grad_embedded(mtp), holder);
}

BufferId ChunkTasks::inputs(const Holder& holder) {
  return make("inputs", holder, "inputs",
              BatchInputs::count_bytes(programs_.shape, programs_.part.groups, programs_.config),
              Purpose::kInputs);
}

BufferId ChunkTasks::results(const Holder& holder) {
  return make("results", holder, "results", 0, Purpose::kInputs);
}

BufferId ChunkTasks::results(int64_t micro_batch) {
  const std::string name =
      fmt::format("published results, chunk {}, micro-batch {}", idx_, micro_batch);
  return writer_.buffer(name, 0, {.name = name, .purpose = Purpose::kInputs, .home = Home::kHost});
}

BufferId ChunkTasks::balance_sums(const Holder& holder) {
  const int64_t bytes = 2 * programs_.config.moe.router_outputs() * dtype_size(DType::kF64);
  return make("balance sums", holder, "balance sums", bytes, Purpose::kInputs, Home::kHost);
}

BufferId ChunkTasks::balance_gradients(const Holder& holder) {
  const int64_t bytes = programs_.config.moe.router_outputs() * dtype_size(DType::kF32);
  return make("balance gradients", holder, "balance gradients", bytes, Purpose::kInputs);
}

BufferId ChunkTasks::saved(const StepRun& run) {
  if (run.ref.part == kHead) {
    return make_saved(fmt::format("saved of head {}", run.ref.idx), run,
                      head_saved_bytes(programs_, run.ref.idx), &SavedOffsets::heads);
  }
  return make_saved(fmt::format("saved of layer {}", chunk_.first_layer + run.ref.idx), run,
                    layer_saved_bytes(programs_, chunk_, run.ref.idx), &SavedOffsets::layers);
}

BufferId ChunkTasks::kept(const StepRun& run) {
  return make_saved(
      fmt::format("kept for the weights of layer {}", chunk_.first_layer + run.ref.idx), run,
      layer_kept_bytes(programs_, chunk_, run.ref.idx), &SavedOffsets::kept);
}

BufferId ChunkTasks::offloaded(int64_t layer, const Holder& holder, bool reloaded) {
  const std::string of_layer = fmt::format("of layer {}", chunk_.first_layer + layer);
  std::optional<int64_t> offset;
  if (placement_ != nullptr) offset = placement_->offsets[idx_][holder.place].offloaded.at(layer);
  return make(fmt::format("{} {}", reloaded ? "reloaded" : "offloaded", of_layer), holder,
              fmt::format("offloaded {}", of_layer),
              layer_offloaded_bytes(programs_, chunk_, layer), Purpose::kSaved, Home::kDevice,
              offset);
}

BufferId ChunkTasks::host_copy(int64_t layer, const Holder& holder) {
  const std::string name = fmt::format("host's copy of layer {}", chunk_.first_layer + layer);
  return make(name, holder, name, layer_offloaded_bytes(programs_, chunk_, layer),
              Purpose::kOffloaded, Home::kHost,
              placement_->offsets[idx_][holder.place].host.at(layer));
}

void ChunkTasks::add_offloaded(const StepRun& run, Task& task) {
  if (layer_offloaded_bytes(programs_, chunk_, run.ref.idx) == 0) return;
  const Holder holder{run.micro_batch, run.place};
  if (run.ref.direction == kForward)
    return write(task, offloaded(run.ref.idx, holder, /*reloaded=*/false));
  read(task, offloaded(run.ref.idx, holder, offloads_.contains({run.ref.idx, run.micro_batch})));
}

void ChunkTasks::add_stash(const StepRun& run, Task& task) {
  if (placement_ == nullptr || layer_stash(programs_, chunk_, run.ref.idx).most == 0) return;
  const StashNeed& need = placement_->stash;
  const int64_t bytes = StashPool::count_bytes(programs_, need, need.planned);
  update(task, writer_.state("stash", bytes, Home::kDevice, Purpose::kStashed));
}

Task ChunkTasks::copy(const LayerOffload& offload, bool stores) {
  Task task{.kind = TaskKind::kCopy,
            .action = stores ? TaskAction::kStore : TaskAction::kReload,
            .lane = writer_.lane(stores ? LaneKind::kStores : LaneKind::kReloads),
            .name = fmt::format("{}, layer {}, micro-batch {}", stores ? "store" : "reload",
                                chunk_.first_layer + offload.layer, offload.micro_batch),
            .bytes = layer_moved_bytes(programs_, chunk_, offload.layer),
            .subject = {.chunk = idx_,
                        .place = offload.place,
                        .micro_batch = offload.micro_batch,
                        .unit = offload.layer}};
  const Holder holder{offload.micro_batch, offload.place};
  const BufferId on_device = offloaded(offload.layer, holder, /*reloaded=*/!stores);
  const BufferId on_host = host_copy(offload.layer, holder);
  read(task, stores ? on_device : on_host);
  write(task, stores ? on_host : on_device);
  return task;
}

Task ChunkTasks::store(const LayerOffload& offload) {
  return copy(offload, /*stores=*/true);
}

Task ChunkTasks::reload(const LayerOffload& offload) {
  return copy(offload, /*stores=*/false);
}

void ChunkTasks::add_embedding(const StepRun& run, Task& task) {
  const Holder holder{run.micro_batch, run.place};
  const int64_t mtp = run.ref.idx - streams_.decoder;
  const bool first = run.ref.part == kEmbedding;
  read(task, inputs(holder));
  if (run.ref.direction == kForward) {
    write(task, first ? hidden(0, holder) : embedded(mtp, holder));
  } else {
    read(task, first ? gradient(0, holder) : embedded_gradient(mtp, holder));
  }
}

void ChunkTasks::add_head(const StepRun& run, Task& task) {
  const Holder holder{run.micro_batch, run.place};
  const int64_t depth = run.ref.idx;
  read(task, inputs(holder));
  read(task, hidden(streams_.decoder + depth, holder));
  if (run.ref.direction == kBackward) {
    read(task, saved(run));
    write(task, outside_gradient(depth, holder));
    return;
  }
  write(task, results(holder));
  if (run.ref.part == kHead) write(task, saved(run));
}

void ChunkTasks::add_layer(const StepRun& run, Task& task) {
  const Holder holder{run.micro_batch, run.place};
  const int64_t input = streams_.before + run.ref.idx;
  read(task, inputs(holder));
  read(task, hidden(input, holder));
  if (run.ref.direction != kForward) return add_layer_backward(run, task);
  if (is_mtp(run.ref.idx)) read(task, embedded(run.ref.idx - streams_.decoder, holder));
  write(task, hidden(input + 1, holder));
  write(task, saved(run));
  add_offloaded(run, task);
  add_stash(run, task);
  write(task, results(holder));
}

/// The weights' part reads what the inputs' part does, and what that kept.
void ChunkTasks::add_layer_backward(const StepRun& run, Task& task) {
  const Holder holder{run.micro_batch, run.place};
  const int64_t input = streams_.before + run.ref.idx;
  const bool weights = run.ref.direction == kWeights;
  read(task, saved(run));
  add_offloaded(run, task);
  add_stash(run, task);
  read(task, hidden(input + 1, holder));
  read(task, gradient(input + 1, holder));
  if (is_mtp(run.ref.idx)) {
    const int64_t mtp = run.ref.idx - streams_.decoder;
    read(task, embedded(mtp, holder));
    read(task, outside_gradient(input - streams_.decoder, holder));
    weights ? read(task, embedded_gradient(mtp, holder))
            : write(task, embedded_gradient(mtp, holder));
  }
  const int64_t layer = chunk_.first_layer + run.ref.idx;
  if (balances_model_ && programs_.config.is_moe_layer(layer) &&
      !programs_.config.is_hash_layer(layer))
    read(task, balance_gradients(holder));
  weights ? read(task, gradient(input, holder)) : write(task, gradient(input, holder));
  if (!programs_.part.split_weights) return;
  if (find_executable(programs_, chunk_, {kLayer, kBackward, run.ref.idx}).plan().saved_bytes == 0)
    return;
  weights ? read(task, kept(run)) : write(task, kept(run));
}

const ChunkTasks::ProgramCost& ChunkTasks::cost_of(const Executable& executable,
                                                   const RunPart& part) {
  const std::tuple key(&executable, part.begin, part.end);
  const auto known = costs_.find(key);
  if (known != costs_.end()) return known->second;
  ProgramCost& cost = costs_[key];
  std::map<LaneId, InnerExchanges> inside;
  const Program& program = executable.program();
  const std::span all(program.nodes());
  const auto begin = static_cast<size_t>(part.begin);
  for (const Node& node : all.subspan(begin, (part.is_last() ? all.size() : part.end) - begin)) {
    cost.cost += node.op->cost(program.types(node.inputs), program.types(node.outputs));
    const Communicator* const group = group_of(*node.op);
    if (group == nullptr || group->size() == 1) continue;
    const LaneId lane = writer_.group(*group);
    InnerExchanges& exchanges = inside.try_emplace(lane, InnerExchanges{lane}).first->second;
    ++exchanges.count;
    exchanges.bytes += input_bytes(program, node);
  }
  for (const auto& [lane, exchanges] : inside) cost.inside.push_back(exchanges);
  return cost;
}

/// Of all parts of a run; passes that are merged have memory of their own.
BufferId ChunkTasks::working(const StepRun& run, const std::string& name) {
  const bool apart = programs_.part.merges_passes && run.ref.direction != kForward;
  return writer_.buffer(
      fmt::format("working memory, {}, chunk {}", name, idx_),
      run.executable->plan().transient_bytes,
      {.name = apart ? "working memory, backward" : "working memory",
       .bytes = programs_.part.merges_passes && !apart ? programs_.backward_working()
                                                       : programs_.working_bytes(),
       .purpose = Purpose::kWorking});
}

Task ChunkTasks::run(const StepRun& run) {
  const ProgramCost& cost = cost_of(*run.executable, run.part);
  const std::string name =
      fmt::format("{}, micro-batch {}", describe(chunk_, run.ref), run.micro_batch);
  const bool whole = run.part.is_first() && run.part.is_last();
  Task task{.kind = TaskKind::kRun,
            .action = TaskAction::kRunProgram,
            .lane = writer_.lane(LaneKind::kCompute),
            .name = whole ? name : fmt::format("{}, from node {}", name, run.part.begin),
            .flops = cost.cost.flops,
            .bytes = static_cast<int64_t>(cost.cost.bytes),
            .subject = {.program = run.ref,
                        .part = run.part,
                        .chunk = idx_,
                        .place = run.place,
                        .micro_batch = run.micro_batch}};
  if (run.ref.part == kLayer) {
    add_layer(run, task);
  } else if (run.ref.part == kHead || run.ref.part == kEvaluationHead) {
    add_head(run, task);
  } else {
    add_embedding(run, task);
  }
  write(task, working(run, name));
  if (!run.part.is_first()) {
    for (const BufferId begun : task.writes) read(task, begun);
  }
  return task;
}

Task ChunkTasks::load(const StepPass& pass) {
  const Holder holder{pass.step.micro_batch, pass.place};
  Task task{.kind = TaskKind::kCopy,
            .action = TaskAction::kLoadInputs,
            .lane = writer_.lane(LaneKind::kCopiesIn),
            .name = fmt::format("inputs, chunk {}, micro-batch {}", idx_, holder.micro_batch),
            .subject = {.chunk = idx_, .place = pass.place, .micro_batch = holder.micro_batch}};
  task.bytes = BatchInputs::count_bytes(programs_.shape, programs_.part.groups, programs_.config);
  write(task, inputs(holder));
  return task;
}

Task ChunkTasks::publish(const StepPass& pass) {
  const Holder holder{pass.step.micro_batch, pass.place};
  Task task{.kind = TaskKind::kCopy,
            .action = TaskAction::kPublish,
            .lane = writer_.lane(LaneKind::kCopiesOut),
            .name = fmt::format("results, chunk {}, micro-batch {}", idx_, holder.micro_batch),
            .subject = {.chunk = idx_, .place = pass.place, .micro_batch = holder.micro_batch}};
  // A chunk without layers or loss has none.
  if (chunk_.loss || chunk_.all_layers() > 0) read(task, results(holder));
  write(task, results(holder.micro_batch));
  return task;
}

Task ChunkTasks::sum_balance(const StepPass& pass) {
  const Holder holder{pass.step.micro_batch, pass.place};
  Task task{.kind = TaskKind::kHost,
            .action = TaskAction::kSumBalance,
            .lane = writer_.lane(LaneKind::kHost),
            .name = fmt::format("balance sums, chunk {}, micro-batch {}", idx_, holder.micro_batch),
            .subject = {.chunk = idx_, .place = pass.place, .micro_batch = holder.micro_batch}};
  if (chunk_.all_layers() > 0) read(task, results(holder));
  if (!chunk_.embedding) read(task, balance_sums(holder));
  write(task, balance_sums(holder));
  if (!chunk_.loss) return task;
  write(task, balance_gradients(holder));
  const Communicator& group = *programs_.part.groups.micro_batch;
  if (group.size() > 1) task.inside.push_back({writer_.group(group), 1, 0});
  return task;
}

std::vector<ChunkTasks::Message> ChunkTasks::forward_messages(const Holder& holder, bool in) {
  std::vector<Message> messages;
  for (int64_t i = 0; i < (in ? streams_.num_in() : streams_.num_out()); ++i) {
    const BufferId buffer = hidden(in ? i : streams_.decoder + i, holder);
    messages.push_back({fmt::format("hidden states {}", i), buffer, programs_.hidden_bytes()});
  }
  if (balances_model_) {
    messages.push_back({"balance sums", balance_sums(holder),
                        2 * programs_.config.moe.router_outputs() * dtype_size(DType::kF64)});
  }
  return messages;
}

std::vector<ChunkTasks::Message> ChunkTasks::backward_messages(const Holder& holder, bool in) {
  std::vector<Message> messages;
  for (int64_t i = 0; i < (in ? streams_.num_out() : streams_.num_in()); ++i) {
    const BufferId buffer = in ? outside_gradient(i, holder) : gradient(i, holder);
    messages.push_back({fmt::format("gradients {}", i), buffer, programs_.hidden_bytes()});
  }
  if (balances_model_) {
    messages.push_back({"balance gradients", balance_gradients(holder),
                        programs_.config.moe.router_outputs() * dtype_size(DType::kF32)});
  }
  return messages;
}

std::vector<ChunkTasks::Message> ChunkTasks::messages_in(const StepPass& pass) {
  const Holder holder{pass.step.micro_batch, pass.place};
  return pass.step.pass == PipelinePass::kForward ? forward_messages(holder, true)
                                                  : backward_messages(holder, true);
}

std::vector<ChunkTasks::Message> ChunkTasks::messages_out(const StepPass& pass) {
  const Holder holder{pass.step.micro_batch, pass.place};
  return pass.step.pass == PipelinePass::kForward ? forward_messages(holder, false)
                                                  : backward_messages(holder, false);
}

}  // namespace tessera
