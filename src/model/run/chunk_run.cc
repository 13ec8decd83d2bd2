#include "model/run/chunk_run.h"

#include <algorithm>
#include <map>

namespace tessera {

MicroBatchResult& MicroBatchResult::operator+=(const MicroBatchResult& other) {
  loss += other.loss;
  mtp_loss += other.mtp_loss;
  balance_loss += other.balance_loss;
  z_loss += other.z_loss;
  dropped += other.dropped;
  return *this;
}

ChunkRun::ChunkRun(const StagePrograms& programs, const PipelineChunk& chunk,
                   const TokenShare& tokens, ParameterSet& parameters,
                   std::vector<ExpertState>& experts, const SharedMemory& shared,
                   WeightStore* store)
    : programs_(programs),
      chunk_(chunk),
      tokens_(tokens),
      parameters_(parameters),
      store_(store),
      memory_(programs, chunk),
      bound_(bind_chunk(programs, chunk, memory_, parameters, experts, shared)) {
  order_passes();
}

void ChunkRun::order_passes() {
  if (chunk_.embedding) forward_pass_.push_back(&bound_.embedding.forward);
  for (BoundLayer& layer : bound_.layers) {
    if (layer.is_mtp()) forward_pass_.push_back(&layer.embedding.forward);
    forward_pass_.push_back(&layer.forward);
    if (!layer.is_mtp()) evaluation_pass_ = forward_pass_;
  }
  if (evaluation_pass_.empty() && chunk_.embedding) evaluation_pass_ = {&bound_.embedding.forward};
  if (chunk_.loss) evaluation_pass_.push_back(&bound_.evaluation);
  for (BoundPasses& head : bound_.heads) forward_pass_.push_back(&head.forward);
  for (auto head = bound_.heads.rbegin(); head != bound_.heads.rend(); ++head)
    backward_pass_.push_back(&head->backward);
  for (auto layer = bound_.layers.rbegin(); layer != bound_.layers.rend(); ++layer) {
    backward_pass_.push_back(&layer->backward);
    if (layer->is_mtp()) backward_pass_.push_back(&layer->embedding.backward);
    if (layer->kind->derived.weights) weight_pass_.push_back(&layer->weights);
  }
  if (chunk_.embedding) backward_pass_.push_back(&bound_.embedding.backward);
  find_completed();
}

/// Who asks is told in the last pass alone: what only passes before it add to is complete when it
/// begins.
void ChunkRun::find_completed() {
  const std::vector<BoundProgram*>& last = weight_pass_.empty() ? backward_pass_ : weight_pass_;
  std::map<size_t, BoundProgram*> completed_by;
  for (const auto* pass : {&forward_pass_, &backward_pass_, &weight_pass_}) {
    for (BoundProgram* program : *pass) {
      for (const ProgramParameters::Place& place : program->parameters.gradients)
        completed_by[place.parameter] = pass == &last ? program : last.front();
    }
  }
  for (const auto& [parameter, program] : completed_by) program->completes.push_back(parameter);
}

ChunkRun::Bytes ChunkRun::count_bytes(const StagePrograms& programs, const PipelineChunk& chunk) {
  Bytes bytes{
      .hidden = ChunkStreams(programs, chunk).count() * programs.hidden_bytes(),
      .inputs = BatchInputs::count_bytes(programs.shape, programs.part.groups, programs.config)};
  if (chunk.loss) {
    for (const HeadPasses& head : programs.heads)
      bytes.saved += head.derived.forward.plan().saved_bytes;
  }
  for (int64_t i = 0; i < chunk.all_layers(); ++i) {
    const DerivedProgram& program = programs.kind_of(chunk.first_layer + i).derived;
    bytes.saved += program.forward.plan().saved_bytes;
    if (program.weights) bytes.saved += program.backward.plan().saved_bytes;
  }
  return bytes;
}

void ChunkRun::stage(const MicroBatch& batch, const LossScales& scales) {
  scales_ = scales;
  memory_.inputs.stage(batch, tokens_, scales, programs_.part.groups.token_ranks());
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

void ChunkRun::bring_weights(const std::vector<BoundProgram*>& pass, size_t idx) {
  store_->prepare(pass[idx]->parameters);
  if (idx + 1 < pass.size()) store_->prepare(pass[idx + 1]->parameters);
  store_->bind(pass[idx]->parameters, pass[idx]->bindings);
}

/// Which sums of gradients the program is the first of its step to add to; a store's are zeroed.
void ChunkRun::find_unset(BoundProgram& bound) {
  bound.bindings.unset.clear();
  for (const ProgramParameters::Place& place : bound.parameters.gradients) {
    if (parameters_.begin_gradient(place.parameter)) bound.bindings.unset.push_back(place.value);
  }
}

void ChunkRun::run(const std::vector<BoundProgram*>& pass, const NodeObserver& observer,
                   const ParameterHook& before, const ParameterHook& after) {
  for (size_t idx = 0; idx < pass.size(); ++idx) {
    BoundProgram& bound = *pass[idx];
    if (before) before(bound.reads);
    if (store_ != nullptr) {
      bring_weights(pass, idx);
    } else {
      find_unset(bound);
    }
    bound.program->run(bound.bindings, observer);
    if (store_ != nullptr) store_->done(bound.parameters);
    if (after) after(bound.completes);
  }
}

void ChunkRun::forward(const NodeObserver& observer, const PassHooks& hooks) {
  run(forward_pass_, observer, hooks.before_forward, {});
  if (!balances_whole_model(programs_.config)) return;
  add_balance_sums();
  if (chunk_.loss) model_balance_ = memory_.balance.finish(scales_.balance);
}

double ChunkRun::evaluate(const NodeObserver& observer) {
  run(evaluation_pass_, observer, {}, {});
  memory_.statistics.publish();
  device().synchronize();
  memory_.inputs.release();
  memory_.statistics.take();
  return chunk_.loss ? memory_.statistics.taken_loss(0) : 0;
}

void ChunkRun::backward(const NodeObserver& observer, const PassHooks& hooks) {
  run(backward_pass_, observer, {}, weight_pass_.empty() ? hooks.after_backward : ParameterHook());
}

void ChunkRun::backward_weights(const NodeObserver& observer, const PassHooks& hooks) {
  run(weight_pass_, observer, {}, hooks.after_backward);
}

/// Adds this chunk's layers to the sums of those before. The device is waited for.
void ChunkRun::add_balance_sums() {
  memory_.statistics.read();
  if (chunk_.embedding) memory_.balance.clear();
  for (const BoundLayer& layer : bound_.layers) {
    if (layer.experts == nullptr) continue;
    const LayerStatistics statistics = memory_.statistics.current_layer(layer.moe_idx);
    memory_.balance.add_layer(statistics.counts.span<float>(),
                              statistics.score_means.span<float>());
  }
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
  memory_.statistics.publish();
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
  const auto ranks = static_cast<double>(programs_.part.groups.token_ranks());
  for (BoundLayer& layer : bound_.layers) {
    if (layer.experts == nullptr) continue;
    const LayerStatistics statistics = memory_.statistics.taken_layer(layer.moe_idx);
    result.balance_loss += *statistics.balance_loss.as<float>() / num_moe;
    result.z_loss += *statistics.z_loss.as<float>() / num_moe / ranks;
    result.dropped += *statistics.dropped.as<int64_t>();
    const auto counts = statistics.counts.span<float>();
    const auto step_counts = layer.experts->step_counts.get().span<float>();
    for (size_t e = 0; e < counts.size(); ++e) step_counts[e] += counts[e];
  }
  if (balances_whole_model(programs_.config)) result.balance_loss = model_balances_.front();
  model_balances_.pop_front();
  return result;
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
