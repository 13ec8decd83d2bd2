#include "model/run/chunk_run.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace tessera {
namespace {

/// Of a micro-batch of dynamic context parallelism: its balance losses count by its ranks, of z
/// losses a rank's own tokens as in a micro-batch of the `fixed` degree. On the host alone.
void weigh_losses(const BoundChunk& bound, const PassStatistics& statistics, int64_t degree,
                  int64_t fixed) {
  for (const BoundLayer& layer : bound.layers) {
    if (layer.experts == nullptr) continue;
    const LayerStatistics of_layer = statistics.layer(layer.moe_idx);
    *of_layer.balance_loss.as<float>() *= static_cast<float>(degree);
    *of_layer.z_loss.as<float>() *= static_cast<float>(fixed);
  }
}

}  // namespace

MicroBatchResult& MicroBatchResult::operator+=(const MicroBatchResult& other) {
  loss += other.loss;
  mtp_loss += other.mtp_loss;
  balance_loss += other.balance_loss;
  z_loss += other.z_loss;
  dropped += other.dropped;
  missing_pages = std::max(missing_pages, other.missing_pages);
  if (max_logits.empty()) {
    max_logits = other.max_logits;
  } else if (!other.max_logits.empty()) {
    std::ranges::transform(max_logits, other.max_logits, max_logits.begin(),
                           [](float own, float others) { return std::max(own, others); });
  }
  return *this;
}

ChunkRun::ChunkRun(const StagePrograms& programs, const PipelineChunk& chunk,
                   const TokenShare& tokens, const ChunkState& state, const SavedOffsets& offsets)
    : programs_(programs),
      chunk_(chunk),
      tokens_(tokens),
      parameters_(state.parameters),
      weight_copies_(state.weight_copies),
      roundings_(state.roundings),
      store_(state.store),
      copies_(state.copies),
      stash_(state.stash),
      slabs_(state.slabs),
      memory_(programs, chunk, state.slabs, offsets),
      bound_(bind_chunk(programs, chunk, memory_, state)),
      stored_(bound_.layers.size()) {
  for (const auto& of_degree : programs.of_degrees)
    bound_of_degrees_.push_back(bind_chunk(*of_degree, chunk, memory_, state));
}

ChunkRun::Bytes ChunkRun::count_bytes(const StagePrograms& programs, const PipelineChunk& chunk) {
  return {
      .hidden = ChunkStreams(programs, chunk).count() * programs.hidden_bytes(),
      .inputs = BatchInputs::count_bytes(programs.shape, programs.part.groups, programs.config)};
}

BatchInputs::Given ChunkRun::as_given(const MicroBatch& batch, const LossScales& scales) const {
  if (batch.context == nullptr)
    return {batch, tokens_, scales, programs_.part.groups.token_ranks()};
  const int64_t degree = batch.context->degree;
  // The losses beside the main one are means over a micro-batch, of which larger ones count more.
  LossScales own = scales;
  own.balance *= static_cast<float>(degree);
  own.z_loss *= static_cast<float>(degree);
  return {batch, batch.context->tokens, own, degree * programs_.part.groups.tp->size()};
}

void ChunkRun::stage(const MicroBatch& batch, const LossScales& scales) {
  scales_ = scales;
  degree_ = batch.context == nullptr ? 0 : batch.context->degree;
  memory_.inputs.stage(as_given(batch, scales));
}

void ChunkRun::fill_inputs(std::byte* inputs, const MicroBatch& batch,
                           const LossScales& scales) const {
  memory_.inputs.fill(inputs, as_given(batch, scales));
}

void ChunkRun::stage_spare(int64_t number, const LossScales& scales) {
  scales_ = scales;
  memory_.inputs.stage_spare(number);
}

void ChunkRun::bring() {
  memory_.inputs.bring();
  bring_expert_biases();
}

/// Gives the device the biases, which the host moves between steps, when it has waited for it.
void ChunkRun::bring_expert_biases() {
  if (device().is_host()) return;
  for (const BoundLayer& layer : bound_.layers) {
    if (layer.experts == nullptr || !layer.kind->layout.has(Port::kExpertBias)) continue;
    const Tensor bias = layer.experts->bias;
    device().copy(layer.expert_bias.get().data, bias.data, bias.num_bytes());
  }
}

/// Which sums of gradients the program is the first of its step to add to; a store's are zeroed.
void ChunkRun::find_unset(BoundProgram& bound) {
  bound.bindings.unset.clear();
  for (const ProgramParameters::Place& place : bound.parameters.gradients) {
    if (parameters_.begin_sum(place.parameter)) bound.bindings.unset.push_back(place.value);
  }
}

/// Before the first run of a step that reads them.
void ChunkRun::renew_copies(const ProgramRef& program, const NodeObserver& observer) {
  if (program.part != ProgramPart::kLayer) return;
  if (!weight_copies_.take_turn(chunk_.first_layer + program.idx)) return;
  const BoundProgram& copies = bound_.layers[program.idx].copies;
  copies.program->run(copies.bindings, observer);
}

BoundChunk& ChunkRun::bound() {
  if (degree_ == 0) return bound_;
  return bound_of_degrees_.at(std::countr_zero(static_cast<uint64_t>(degree_)));
}

void ChunkRun::begin_run(const ProgramRef& program, BoundProgram& bound,
                         const NodeObserver& observer) {
  renew_copies(program, observer);
  if (store_ != nullptr) {
    store_->bind(bound.parameters, bound.bindings);
  } else {
    find_unset(bound);
  }
}

void ChunkRun::run(const ProgramRef& program, const RunPart& part, const NodeObserver& observer) {
  BoundProgram& bound = this->bound().find(program);
  if (part.is_first()) begin_run(program, bound, observer);
  if (part.is_first() && part.is_last()) {
    bound.program->run(bound.bindings, observer);
  } else {
    if (part.is_first()) under_way_.emplace(*bound.program, bound.bindings, observer);
    under_way_.value().run_to(part.end);
    if (!part.is_last()) return;
    under_way_.reset();
  }
  if (store_ != nullptr) store_->done(bound.parameters);
  leave_saved(program);
}

/// Behind the last run that reads what a layer saved.
void ChunkRun::leave_saved(const ProgramRef& program) {
  if (program.part != ProgramPart::kLayer || !slabs_.is_by_page()) return;
  const int64_t idx = program.idx;
  const bool is_split = bound_.layers[idx].kind->derived.weights.has_value();
  if (program.direction != (is_split ? PassDirection::kWeights : PassDirection::kBackward)) return;
  const SavedOffsets& offsets = memory_.saved_offsets;
  slabs_.leave(memory_.saved_at(offsets.layers, idx), layer_saved_bytes(programs_, chunk_, idx));
  slabs_.leave(memory_.saved_at(offsets.offloaded, idx),
               layer_offloaded_bytes(programs_, chunk_, idx));
  slabs_.leave(memory_.saved_at(offsets.kept, idx), layer_kept_bytes(programs_, chunk_, idx));
}

const ProgramParameters& ChunkRun::parameters_of(const ProgramRef& program) {
  return bound().find(program).parameters;
}

void ChunkRun::run_pass(PassDirection direction, const NodeObserver& observer) {
  for (const ProgramRef& program : list_pass(programs_, chunk_, direction)) run(program, observer);
}

/// Where the rows are known, those that came.
CopyLane::Ticket ChunkRun::store(int64_t idx) {
  ensure(copies_.stores != nullptr, "layer {} of the chunk is stored, but none was to be", idx);
  const int64_t all = layer_offloaded_bytes(programs_, chunk_, idx);
  const BoundProgram& forward = bound_.layers.at(idx).forward;
  stored_[idx] = slabs_.is_by_page() ? forward.program->find_offloaded(forward.bindings)
                                     : Executable::OffloadedRows{.parts = {{0, all, all}}};
  std::byte* const there = copies_.memory.data() + memory_.saved_offsets.host.at(idx);
  const std::byte* const here = memory_.saved_at(memory_.saved_offsets.offloaded, idx);
  std::vector<CopyLane::Part> parts;
  for (const auto& part : stored_[idx].parts)
    parts.push_back({there + part.offset, here + part.offset, part.num_bytes});
  return copies_.stores->give_parts(parts);
}

CopyLane::Ticket ChunkRun::reload(int64_t idx) {
  ensure(copies_.reloads != nullptr, "layer {} of the chunk is reloaded, but none was to be", idx);
  const std::byte* const there = copies_.memory.data() + memory_.saved_offsets.host.at(idx);
  std::byte* const here = memory_.saved_at(memory_.saved_offsets.offloaded, idx);
  std::vector<CopyLane::Part> parts;
  for (const auto& [address, rows] : stored_[idx].extents) slabs_.note_rows(address, rows);
  for (const auto& part : stored_[idx].parts) {
    slabs_.commit(here + part.offset, part.read_bytes);
    parts.push_back({here + part.offset, there + part.offset, part.num_bytes});
  }
  return copies_.reloads->give_parts(parts);
}

void ChunkRun::wait_stored(int64_t idx, CopyLane::Ticket copy) {
  copies_.stores->join(copy);
  slabs_.leave(memory_.saved_at(memory_.saved_offsets.offloaded, idx),
               layer_offloaded_bytes(programs_, chunk_, idx));
}

void ChunkRun::sum_balance() {
  memory_.statistics.read();
  if (chunk_.embedding) memory_.balance.clear();
  for (const BoundLayer& layer : bound_.layers) {
    if (layer.experts == nullptr || !layer.experts->is_balanced) continue;
    const LayerStatistics statistics = memory_.statistics.current_layer(layer.moe_idx);
    memory_.balance.add_layer(statistics.counts.span<float>(),
                              statistics.score_means.span<float>());
  }
  if (chunk_.loss) model_balance_ = memory_.balance.finish(scales_.balance);
}

ChunkRun::Messages ChunkRun::forward_messages() const {
  Messages messages;
  for (int64_t i = 0; i < memory_.streams.num_in(); ++i) messages.in.push_back(hidden_in(i));
  for (int64_t i = 0; i < memory_.streams.num_out(); ++i) messages.out.push_back(hidden_out(i));
  if (!balances_whole_model(programs_.config)) return messages;
  messages.in.push_back(memory_.balance.sums());
  messages.out.push_back(memory_.balance.sums());
  return messages;
}

ChunkRun::Messages ChunkRun::backward_messages() const {
  Messages messages;
  for (int64_t i = 0; i < memory_.streams.num_out(); ++i)
    messages.in.push_back(memory_.grad_out(i));
  for (int64_t i = 0; i < memory_.streams.num_in(); ++i)
    messages.out.push_back(memory_.stream(memory_.streams.grad(i)));
  if (!balances_whole_model(programs_.config)) return messages;
  messages.in.push_back(memory_.balance.grad_score_means());
  messages.out.push_back(memory_.balance.grad_score_means());
  return messages;
}

void ChunkRun::finish() {
  const StageGroups& groups = programs_.part.groups;
  if (degree_ > 0)
    weigh_losses(bound_, memory_.statistics, degree_, groups.token_ranks() / groups.tp->size());
  memory_.statistics.publish();
  roundings_.publish();
  model_balances_.push_back(model_balance_);
}

void ChunkRun::finish_again() {
  memory_.statistics.publish_again();
  model_balances_.push_back(model_balance_);
}

Tensor ChunkRun::finished_loss() const {
  return chunk_.loss ? memory_.statistics.published_loss(0) : Tensor();
}

void ChunkRun::forget_results() {
  under_way_.reset();
  memory_.inputs.clear();
  memory_.statistics.clear();
  model_balances_.clear();
}

MicroBatchResult ChunkRun::collect() {
  memory_.inputs.release();
  memory_.statistics.take();
  MicroBatchResult result;
  if (chunk_.loss) {
    result.loss = memory_.statistics.taken_loss(0);
    for (int64_t depth = 1; depth <= programs_.config.mtp_layers; ++depth)
      result.mtp_loss += memory_.statistics.taken_loss(depth);
  }
  const auto num_moe = static_cast<double>(std::max<int64_t>(programs_.config.num_moe_layers(), 1));
  const auto num_balanced =
      static_cast<double>(std::max<int64_t>(programs_.config.num_balanced_layers(), 1));
  const auto ranks = static_cast<double>(programs_.part.groups.token_ranks());
  const MoeConfig& moe = programs_.config.moe;
  for (BoundLayer& layer : bound_.layers) {
    if (layer.experts == nullptr) continue;
    const LayerStatistics statistics = memory_.statistics.taken_layer(layer.moe_idx);
    if (layer.experts->is_balanced)
      result.balance_loss += *statistics.balance_loss.as<float>() / num_balanced;
    result.z_loss += *statistics.z_loss.as<float>() / num_moe / ranks;
    // Where experts choose, what they left is no loss.
    if (!moe.experts_choose()) result.dropped += *statistics.dropped.as<int64_t>();
    const auto counts = statistics.counts.span<float>();
    const auto step_counts = layer.experts->step_counts.get().span<float>();
    const auto share =
        static_cast<float>(moe.top_k) / static_cast<float>(std::max<int64_t>(moe.choices(), 1));
    for (size_t e = 0; e < counts.size(); ++e)
      step_counts[e] += moe.experts_choose() ? counts[e] * share : counts[e];
  }
  if (balances_whole_model(programs_.config)) result.balance_loss = model_balances_.front();
  model_balances_.pop_front();
  result.max_logits = collect_max_logits();
  return result;
}

std::vector<float> ChunkRun::collect_max_logits() const {
  if (programs_.shape.qk_clip <= 0) return {};
  const ModelConfig& config = programs_.config;
  const IndexRange heads = attended_heads(config, programs_.part.groups);
  std::vector<float> all(config.all_layers() * config.num_heads,
                         std::numeric_limits<float>::lowest());
  for (int64_t idx = 0; idx < chunk_.all_layers(); ++idx) {
    const int64_t layer = chunk_.first_layer + idx;
    std::ranges::copy(memory_.statistics.taken_max_logits(idx).span<float>(),
                      all.begin() + layer * config.num_heads + heads.begin);
  }
  return all;
}

double ChunkRun::collect_loss() {
  memory_.inputs.release();
  memory_.statistics.take();
  model_balances_.pop_front();
  if (stash_ != nullptr) stash_->reset();
  return chunk_.loss ? memory_.statistics.taken_loss(0) : 0;
}

std::vector<std::vector<double>> ChunkRun::counts() const {
  std::vector<std::vector<double>> result;
  for (const BoundLayer& layer : bound_.layers) {
    if (layer.experts == nullptr) continue;
    const auto counts = memory_.statistics.taken_layer(layer.moe_idx).counts.span<float>();
    result.emplace_back(counts.begin(), counts.end());
  }
  return result;
}

}  // namespace tessera
