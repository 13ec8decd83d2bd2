#include "model/run/chunk_run.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace tessera {
namespace {

Tensor& slot(Bindings& bindings, ValueId id) {
  return bindings.tensors[static_cast<size_t>(id)];
}

void bind_if(Bindings& bindings, ValueId id, const Tensor& tensor) {
  if (id >= 0) slot(bindings, id) = tensor;
}

ValueId backward_of(const std::vector<Link>& links, ValueId forward) {
  const auto found = std::ranges::find(links, forward, &Link::forward);
  ensure(found != links.end(), "forward value {} has no counterpart in the backward program",
         forward);
  return found->backward;
}

int64_t count_moe_layers(const ModelConfig& config, const PipelineChunk& chunk) {
  int64_t count = 0;
  for (int64_t i = 0; i < chunk.all_layers(); ++i)
    count += config.is_moe_layer(chunk.first_layer + i) ? 1 : 0;
  return count;
}

TensorByName weights_of(const ParameterSet& parameters, const std::string& prefix) {
  return [&parameters, prefix](const std::string& name) {
    return parameters.find(prefix + name).weight;
  };
}
TensorByName gradients_of(const ParameterSet& parameters, const std::string& prefix) {
  return [&parameters, prefix](const std::string& name) {
    return parameters.find(prefix + name).grad;
  };
}

/// Each value becomes the sum of its group of `group_size` neighbours.
void sum_groups(std::vector<double>& values, int64_t group_size) {
  for (auto group = values.begin(); group != values.end(); group += group_size)
    std::fill_n(group, group_size, std::reduce(group, group + group_size));
}

}  // namespace

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
                   std::vector<ExpertState>& experts, SharedMemory& memory, WeightStore* store)
    : programs_(programs),
      chunk_(chunk),
      streams_(programs, chunk),
      tokens_(tokens),
      memory_(memory),
      parameters_(parameters),
      store_(store),
      inputs_(programs.shape, programs.part.groups, programs.config, device()),
      statistics_(count_moe_layers(programs.config, chunk), programs.config.moe.num_experts,
                  chunk.loss ? 1 + programs.config.mtp_layers : 0, device()),
      hidden_(streams_.count() * programs.hidden_bytes(), "hidden states", device()),
      balance_sums_(DType::kF64, {2, programs.config.moe.num_experts}) {
  if (chunk.embedding)
    bind_embedding(inputs_.tokens, hidden_in(), grad_in(), parameters, embedding_);
  if (chunk.loss) bind_heads(parameters);
  bind_layers(parameters, experts);
  order_passes();
}

void ChunkRun::bind_layers(const ParameterSet& parameters, std::vector<ExpertState>& experts) {
  layers_.resize(static_cast<size_t>(chunk_.all_layers()));
  size_t next_experts = 0;
  for (int64_t layer = 0; layer < chunk_.first_layer; ++layer)
    next_experts += programs_.config.is_moe_layer(layer) ? 1 : 0;
  int64_t next_moe = 0;
  for (int64_t i = 0; i < chunk_.all_layers(); ++i) {
    BoundLayer& layer = layers_[static_cast<size_t>(i)];
    if (programs_.config.is_moe_layer(chunk_.first_layer + i)) {
      layer.experts = &experts.at(next_experts++);
      layer.moe_idx = next_moe++;
    }
    bind_layer(i, parameters);
  }
}

void ChunkRun::order_passes() {
  if (chunk_.embedding) forward_pass_.push_back(&embedding_.forward);
  for (BoundLayer& layer : layers_) {
    const bool mtp = layer.kind->layout.embedded >= 0;
    if (mtp) forward_pass_.push_back(&layer.embedding.forward);
    forward_pass_.push_back(&layer.forward);
    if (!mtp) evaluation_pass_ = forward_pass_;
  }
  if (evaluation_pass_.empty() && chunk_.embedding) evaluation_pass_ = {&embedding_.forward};
  if (chunk_.loss) evaluation_pass_.push_back(&evaluation_);
  for (BoundPasses& head : heads_) forward_pass_.push_back(&head.forward);
  for (auto head = heads_.rbegin(); head != heads_.rend(); ++head)
    backward_pass_.push_back(&head->backward);
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
    backward_pass_.push_back(&layer->backward);
    if (layer->kind->layout.embedded >= 0) backward_pass_.push_back(&layer->embedding.backward);
    if (layer->kind->derived.weights) weight_pass_.push_back(&layer->weights);
  }
  if (chunk_.embedding) backward_pass_.push_back(&embedding_.backward);
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

Tensor ChunkRun::stream(int64_t idx) const {
  return hidden_.tensor(idx * programs_.hidden_bytes(), programs_.shape.dtype,
                        programs_.hidden_shape());
}

/// Joins a program with bindings, which get the shared working memory.
ChunkRun::BoundProgram ChunkRun::join(const Executable& program, const std::string& prefix,
                                      Bindings bindings, const ParameterSet& parameters) const {
  bindings.transient = memory_.transient.data();
  BoundProgram bound = {.program = &program,
                        .bindings = std::move(bindings),
                        .parameters = find_parameters(program.program(), parameters, prefix)};
  for (const ProgramParameters::Place& place : bound.parameters.weights)
    bound.reads.push_back(place.parameter);
  return bound;
}

void ChunkRun::bind_embedding(const Tensor& tokens, const Tensor& hidden, const Tensor& grad,
                              const ParameterSet& parameters, BoundPasses& passes) const {
  const DerivedProgram& program = *programs_.embedding;
  const EmbeddingProgram& layout = programs_.embedding_layout;
  Bindings forward = program.forward.make_bindings();
  bind_weights(program.forward.program(), weights_of(parameters, ""), forward);
  slot(forward, layout.tokens) = tokens;
  slot(forward, layout.hidden_out) = hidden;
  Bindings backward = bind_backward(program, forward, gradients_of(parameters, ""));
  slot(backward, backward_of(program.derived.grad_outputs, layout.hidden_out)) = grad;
  passes.forward = join(program.forward, "", std::move(forward), parameters);
  passes.backward = join(program.backward, "", std::move(backward), parameters);
}

Bindings ChunkRun::bind_head_inputs(const Executable& program, const HeadProgram& layout,
                                    int64_t depth, const ParameterSet& parameters) const {
  Bindings bindings = program.make_bindings();
  bind_weights(program.program(), weights_of(parameters, ""), bindings);
  slot(bindings, layout.hidden) = hidden_out(depth);
  slot(bindings, layout.token_loss) = inputs_.token_loss;
  if (depth == 0) {
    slot(bindings, layout.labels) = inputs_.labels;
    bind_if(bindings, layout.gathered_labels, inputs_.gathered_labels);
    slot(bindings, layout.scale) = inputs_.loss_scale;
    slot(bindings, layout.loss) = statistics_.loss(0);
    return bindings;
  }
  const BatchInputs::Prediction& prediction = inputs_.predictions[static_cast<size_t>(depth - 1)];
  slot(bindings, layout.labels) = prediction.labels;
  bind_if(bindings, layout.gathered_labels, prediction.gathered_labels);
  slot(bindings, layout.scale) = inputs_.mtp_scale;
  slot(bindings, layout.loss) = statistics_.loss(depth);
  return bindings;
}

void ChunkRun::bind_heads(const ParameterSet& parameters) {
  const Executable& evaluation = *programs_.evaluation_head;
  evaluation_ =
      join(evaluation, "", bind_head_inputs(evaluation, programs_.evaluation_layout, 0, parameters),
           parameters);
  heads_.resize(programs_.heads.size());
  for (int64_t depth = 0; depth < std::ssize(heads_); ++depth) bind_head(depth, parameters);
}

void ChunkRun::bind_head(int64_t depth, const ParameterSet& parameters) {
  BoundPasses& passes = heads_[static_cast<size_t>(depth)];
  const DerivedProgram& head = programs_.heads[static_cast<size_t>(depth)].derived;
  const HeadProgram& layout = programs_.heads[static_cast<size_t>(depth)].layout;
  const auto grad = gradients_of(parameters, "");
  passes.saved = Buffer(head.forward.plan().saved_bytes, "saved activations of the head", device());
  Bindings forward = bind_head_inputs(head.forward, layout, depth, parameters);
  forward.saved = passes.saved.data();
  const Program& program = head.forward.program();
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kAccumulator) slot(forward, id) = grad(accumulated_weight(value));
  }
  Bindings backward = bind_backward(head, forward, grad);
  slot(backward, backward_of(head.derived.grad_outputs, layout.loss)) = inputs_.grad_loss;
  slot(backward, backward_of(head.derived.grad_inputs, layout.hidden)) = grad_out(depth);
  passes.forward = join(head.forward, "", std::move(forward), parameters);
  passes.backward = join(head.backward, "", std::move(backward), parameters);
}

void ChunkRun::bind_layer(int64_t idx, const ParameterSet& parameters) {
  BoundLayer& layer = layers_[static_cast<size_t>(idx)];
  const std::string prefix = layer_parameter_name(programs_.config, chunk_.first_layer + idx, "");
  const auto grad = gradients_of(parameters, prefix);
  layer.kind = &programs_.kind_of(chunk_.first_layer + idx);
  const DerivedProgram& program = layer.kind->derived;
  layer.saved = Buffer(program.forward.plan().saved_bytes, "saved activations", device());
  layer.forward = join(program.forward, prefix, program.forward.make_bindings(), parameters);
  Bindings& forward = layer.forward.bindings;
  forward.saved = layer.saved.data();
  bind_weights(program.forward.program(), weights_of(parameters, prefix), forward);
  bind_layer_inputs(idx, layer, parameters);
  bind_layer_outputs(idx, layer);
  layer.backward =
      join(program.backward, prefix, bind_backward(program, forward, grad), parameters);
  bind_layer_gradients(idx, layer);
  if (!program.weights) return;
  layer.kept =
      Buffer(program.backward.plan().saved_bytes, "gradients kept for the weights'", device());
  layer.backward.bindings.saved = layer.kept.data();
  layer.weights =
      join(program.weights->program, prefix,
           bind_weight_pass(program, forward, layer.backward.bindings, grad), parameters);
}

void ChunkRun::bind_layer_inputs(int64_t idx, BoundLayer& layer, const ParameterSet& parameters) {
  const LayerProgram& layout = layer.kind->layout;
  slot(layer.forward.bindings, layout.hidden) = stream(layer_input(idx));
  if (is_mtp(idx)) {
    const int64_t mtp = idx - chunk_.num_layers;
    const BatchInputs::Prediction& prediction =
        inputs_.predictions[static_cast<size_t>(streams_.before + mtp)];
    const Tensor embedded = stream(streams_.embedded(mtp));
    slot(layer.forward.bindings, layout.embedded) = embedded;
    bind_embedding(prediction.tokens, embedded, stream(streams_.grad_embedded(mtp)), parameters,
                   layer.embedding);
  }
  slot(layer.forward.bindings, layout.positions) = inputs_.positions;
  slot(layer.forward.bindings, layout.cu_seqlens) = inputs_.cu_seqlens;
  bind_if(layer.forward.bindings, layout.segments, inputs_.segments);
  bind_if(layer.forward.bindings, layout.token_order, inputs_.token_order);
  if (layer.experts == nullptr) return;
  bind_if(layer.forward.bindings, layout.earlier_counts, layer.experts->earlier_counts);
  if (device().is_host()) {
    bind_if(layer.forward.bindings, layout.expert_bias, layer.experts->bias);
    return;
  }
  if (layout.expert_bias < 0) return;
  const Shape shape{programs_.config.moe.num_experts};
  layer.expert_bias = OwnedTensor(DType::kF32, shape, "expert biases", device());
  slot(layer.forward.bindings, layout.expert_bias) = layer.expert_bias;
}

void ChunkRun::bind_layer_outputs(int64_t idx, BoundLayer& layer) {
  const LayerProgram& layout = layer.kind->layout;
  slot(layer.forward.bindings, layout.hidden_out) = stream(layer_input(idx) + 1);
  if (layer.experts == nullptr) return;
  const LayerStatistics statistics = statistics_.layer(layer.moe_idx);
  slot(layer.forward.bindings, layout.balance_loss) = statistics.balance_loss;
  slot(layer.forward.bindings, layout.z_loss) = statistics.z_loss;
  slot(layer.forward.bindings, layout.score_means) = statistics.score_means;
  slot(layer.forward.bindings, layout.counts) = statistics.counts;
  slot(layer.forward.bindings, layout.dropped) = statistics.dropped;
  // In place: the next micro-batch goes on from there.
  bind_if(layer.forward.bindings, layout.counts_so_far, layer.experts->earlier_counts);
}

void ChunkRun::bind_layer_gradients(int64_t idx, BoundLayer& layer) {
  const LayerProgram& layout = layer.kind->layout;
  const Backward& derived = layer.kind->derived.derived;
  Bindings& bindings = layer.backward.bindings;
  const int64_t input = layer_input(idx);
  slot(bindings, backward_of(derived.grad_inputs, layout.hidden)) = stream(streams_.grad(input));
  slot(bindings, backward_of(derived.grad_outputs, layout.hidden_out)) =
      stream(streams_.grad(input + 1));
  if (is_mtp(idx)) {
    slot(bindings, backward_of(derived.grad_outputs, layout.hidden)) =
        grad_out(input - chunk_.num_layers);
    slot(bindings, backward_of(derived.grad_inputs, layout.embedded)) =
        stream(streams_.grad_embedded(idx - chunk_.num_layers));
  }
  if (layer.experts == nullptr) return;
  const bool whole = balances_whole_model(programs_.config);
  slot(bindings,
       backward_of(derived.grad_outputs, whole ? layout.score_means : layout.balance_loss)) =
      whole ? inputs_.grad_score_means : inputs_.grad_balance;
  slot(bindings, backward_of(derived.grad_outputs, layout.z_loss)) = inputs_.grad_z_loss;
}

void ChunkRun::load(const MicroBatch& batch, const LossScales& scales) {
  scales_ = scales;
  inputs_.load(batch, tokens_);
  inputs_.set_scales(scales, programs_.part.groups.token_ranks());
  bring_expert_biases();
}

/// Gives the device the biases, which the host moves.
void ChunkRun::bring_expert_biases() {
  if (device().is_host()) return;
  for (const BoundLayer& layer : layers_) {
    if (layer.experts == nullptr || layer.kind->layout.expert_bias < 0) continue;
    const Tensor bias = layer.experts->bias;
    device().upload(layer.expert_bias.get().data, bias.data, bias.num_bytes());
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
  if (chunk_.loss) balance_model();
}

double ChunkRun::evaluate(const NodeObserver& observer) {
  run(evaluation_pass_, observer, {}, {});
  statistics_.publish();
  device().synchronize();
  statistics_.take();
  return chunk_.loss ? statistics_.taken_loss(0) : 0;
}

void ChunkRun::backward(const NodeObserver& observer, const PassHooks& hooks) {
  run(backward_pass_, observer, {}, weight_pass_.empty() ? hooks.after_backward : ParameterHook());
}

void ChunkRun::backward_weights(const NodeObserver& observer, const PassHooks& hooks) {
  run(weight_pass_, observer, {}, hooks.after_backward);
}

/// Adds this chunk's layers to the sums of those before. The device is waited for.
void ChunkRun::add_balance_sums() {
  statistics_.read();
  const auto sums = balance_sums_.get().span<double>();
  if (chunk_.embedding) std::ranges::fill(sums, 0.0);
  const auto num_experts = static_cast<size_t>(programs_.config.moe.num_experts);
  for (const BoundLayer& layer : layers_) {
    if (layer.experts == nullptr) continue;
    const LayerStatistics statistics = statistics_.current_layer(layer.moe_idx);
    const auto counts = statistics.counts.span<float>();
    const auto score_means = statistics.score_means.span<float>();
    for (size_t e = 0; e < num_experts; ++e) {
      sums[e] += counts[e];
      sums[num_experts + e] += score_means[e];
    }
  }
}

/// The balance loss over all layers together, E/D · Σ_e f_e·P_e with f_e and P_e their means over
/// the layers, f_e that of the expert's group of D over all ranks that share the tokens and P_e
/// this rank's part; the scale times its gradient is left for every layer's score means.
void ChunkRun::balance_model() {
  const ModelConfig& config = programs_.config;
  const StageGroups& groups = programs_.part.groups;
  const auto sums = balance_sums_.get().span<double>();
  const auto means = sums.last(sums.size() / 2);
  std::vector<double> counts(sums.begin(), sums.begin() + std::ssize(means));
  const Tensor all_counts = view(std::span(counts), {std::ssize(counts)});
  groups.micro_batch->all_reduce(all_counts, all_counts).wait();
  const double assignments = std::max(std::reduce(counts.begin(), counts.end()), 1.0);
  const int64_t group_size = config.moe.balance_group_size;
  sum_groups(counts, group_size);
  const int64_t num_groups = config.moe.num_experts / group_size;
  const double per_layer = static_cast<double>(num_groups) /
                           static_cast<double>(config.num_moe_layers() * groups.token_ranks());
  const auto gradient = inputs_.grad_score_means.get().span<float>();
  model_balance_ = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    const double fraction = counts[e] / assignments;
    model_balance_ += per_layer * fraction * means[e];
    gradient[e] = static_cast<float>(scales_.balance * per_layer * fraction);
  }
  inputs_.grad_score_means.upload();
}

void ChunkRun::finish() {
  statistics_.publish();
  model_balances_.push_back(model_balance_);
}

void ChunkRun::forget_results() {
  statistics_.clear();
  model_balances_.clear();
}

MicroBatchResult ChunkRun::collect() {
  statistics_.take();
  MicroBatchResult result;
  if (chunk_.loss) {
    result.loss = statistics_.taken_loss(0);
    for (int64_t depth = 1; depth <= programs_.config.mtp_layers; ++depth)
      result.mtp_loss += statistics_.taken_loss(depth);
  }
  const auto num_moe = static_cast<double>(std::max<int64_t>(programs_.config.num_moe_layers(), 1));
  const auto ranks = static_cast<double>(programs_.part.groups.token_ranks());
  for (BoundLayer& layer : layers_) {
    if (layer.experts == nullptr) continue;
    const LayerStatistics statistics = statistics_.taken_layer(layer.moe_idx);
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
  for (const BoundLayer& layer : layers_) {
    if (layer.experts == nullptr) continue;
    const auto counts = statistics_.taken_layer(layer.moe_idx).counts.span<float>();
    result.emplace_back(counts.begin(), counts.end());
  }
  return result;
}

}  // namespace tessera
