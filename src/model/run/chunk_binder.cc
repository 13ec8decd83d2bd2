#include "model/run/chunk_binder.h"

#include <algorithm>

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

int64_t count_moe_layers(const ModelConfig& config, const PipelineChunk& chunk) {
  int64_t count = 0;
  for (int64_t i = 0; i < chunk.all_layers(); ++i)
    count += config.is_moe_layer(chunk.first_layer + i) ? 1 : 0;
  return count;
}

/// Fills a BoundChunk.
class ChunkBinder {
 public:
  ChunkBinder(const StagePrograms& programs, const PipelineChunk& chunk, const ChunkMemory& memory,
              const ParameterSet& parameters, const SharedMemory& shared)
      : programs_(programs),
        chunk_(chunk),
        memory_(memory),
        parameters_(parameters),
        shared_(shared) {}

  BoundChunk bind(std::vector<ExpertState>& experts);

 private:
  Device& device() const { return programs_.backend.device(); }
  bool is_mtp(int64_t idx) const { return idx >= chunk_.num_layers; }
  /// Which of the hidden states layer `idx` of the chunk reads.
  int64_t layer_input(int64_t idx) const { return memory_.streams.before + idx; }
  BoundProgram join(const Executable& program, const std::string& prefix, Bindings bindings) const;
  void bind_embedding(const Tensor& tokens, const Tensor& hidden, const Tensor& grad,
                      BoundPasses& passes) const;
  Bindings bind_head_inputs(const Executable& program, const HeadProgram& layout,
                            int64_t depth) const;
  void bind_heads();
  void bind_head(int64_t depth);
  void bind_layers(std::vector<ExpertState>& experts);
  void bind_layer(int64_t idx);
  void bind_layer_inputs(int64_t idx, BoundLayer& layer);
  void bind_layer_outputs(int64_t idx, BoundLayer& layer);
  void bind_layer_gradients(int64_t idx, BoundLayer& layer);

  const StagePrograms& programs_;
  const PipelineChunk& chunk_;
  const ChunkMemory& memory_;
  const ParameterSet& parameters_;
  const SharedMemory& shared_;
  BoundChunk bound_;
};

BoundChunk ChunkBinder::bind(std::vector<ExpertState>& experts) {
  if (chunk_.embedding) {
    bind_embedding(memory_.inputs.tokens, memory_.stream(memory_.streams.hidden(0)),
                   memory_.stream(memory_.streams.grad(0)), bound_.embedding);
  }
  if (chunk_.loss) bind_heads();
  bind_layers(experts);
  return std::move(bound_);
}

void ChunkBinder::bind_layers(std::vector<ExpertState>& experts) {
  bound_.layers.resize(static_cast<size_t>(chunk_.all_layers()));
  size_t next_experts = 0;
  for (int64_t layer = 0; layer < chunk_.first_layer; ++layer)
    next_experts += programs_.config.is_moe_layer(layer) ? 1 : 0;
  int64_t next_moe = 0;
  for (int64_t i = 0; i < chunk_.all_layers(); ++i) {
    BoundLayer& layer = bound_.layers[static_cast<size_t>(i)];
    if (programs_.config.is_moe_layer(chunk_.first_layer + i)) {
      layer.experts = &experts.at(next_experts++);
      layer.moe_idx = next_moe++;
    }
    bind_layer(i);
  }
}

/// Joins a program with bindings, which get the shared working memory.
BoundProgram ChunkBinder::join(const Executable& program, const std::string& prefix,
                               Bindings bindings) const {
  bindings.transient = shared_.transient.data();
  BoundProgram bound = {.program = &program,
                        .bindings = std::move(bindings),
                        .parameters = find_parameters(program.program(), parameters_, prefix)};
  for (const ProgramParameters::Place& place : bound.parameters.weights)
    bound.reads.push_back(place.parameter);
  return bound;
}

void ChunkBinder::bind_embedding(const Tensor& tokens, const Tensor& hidden, const Tensor& grad,
                                 BoundPasses& passes) const {
  const DerivedProgram& program = *programs_.embedding;
  const EmbeddingProgram& layout = programs_.embedding_layout;
  Bindings forward = program.forward.make_bindings();
  bind_weights(program.forward.program(), weights_of(parameters_, ""), forward);
  slot(forward, layout.tokens) = tokens;
  slot(forward, layout.hidden_out) = hidden;
  Bindings backward = bind_backward(program, forward, gradients_of(parameters_, ""));
  slot(backward, backward_of(program.derived.grad_outputs, layout.hidden_out)) = grad;
  passes.forward = join(program.forward, "", std::move(forward));
  passes.backward = join(program.backward, "", std::move(backward));
}

Bindings ChunkBinder::bind_head_inputs(const Executable& program, const HeadProgram& layout,
                                       int64_t depth) const {
  Bindings bindings = program.make_bindings();
  bind_weights(program.program(), weights_of(parameters_, ""), bindings);
  slot(bindings, layout.hidden) = memory_.hidden_out(depth);
  slot(bindings, layout.token_loss) = memory_.inputs.token_loss;
  if (depth == 0) {
    slot(bindings, layout.labels) = memory_.inputs.labels;
    bind_if(bindings, layout.gathered_labels, memory_.inputs.gathered_labels);
    slot(bindings, layout.scale) = memory_.inputs.loss_scale;
    slot(bindings, layout.loss) = memory_.statistics.loss(0);
    return bindings;
  }
  const BatchInputs::Prediction& prediction =
      memory_.inputs.predictions[static_cast<size_t>(depth - 1)];
  slot(bindings, layout.labels) = prediction.labels;
  bind_if(bindings, layout.gathered_labels, prediction.gathered_labels);
  slot(bindings, layout.scale) = memory_.inputs.mtp_scale;
  slot(bindings, layout.loss) = memory_.statistics.loss(depth);
  return bindings;
}

void ChunkBinder::bind_heads() {
  const Executable& evaluation = *programs_.evaluation_head;
  bound_.evaluation =
      join(evaluation, "", bind_head_inputs(evaluation, programs_.evaluation_layout, 0));
  bound_.heads.resize(programs_.heads.size());
  for (int64_t depth = 0; depth < std::ssize(bound_.heads); ++depth) bind_head(depth);
}

void ChunkBinder::bind_head(int64_t depth) {
  BoundPasses& passes = bound_.heads[static_cast<size_t>(depth)];
  const DerivedProgram& head = programs_.heads[static_cast<size_t>(depth)].derived;
  const HeadProgram& layout = programs_.heads[static_cast<size_t>(depth)].layout;
  const auto grad = gradients_of(parameters_, "");
  passes.saved = Buffer(head.forward.plan().saved_bytes, "saved activations of the head", device());
  Bindings forward = bind_head_inputs(head.forward, layout, depth);
  forward.saved = passes.saved.data();
  const Program& program = head.forward.program();
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kAccumulator) slot(forward, id) = grad(accumulated_weight(value));
  }
  Bindings backward = bind_backward(head, forward, grad);
  slot(backward, backward_of(head.derived.grad_outputs, layout.loss)) = memory_.inputs.grad_loss;
  slot(backward, backward_of(head.derived.grad_inputs, layout.hidden)) = memory_.grad_out(depth);
  passes.forward = join(head.forward, "", std::move(forward));
  passes.backward = join(head.backward, "", std::move(backward));
}

void ChunkBinder::bind_layer(int64_t idx) {
  BoundLayer& layer = bound_.layers[static_cast<size_t>(idx)];
  const std::string prefix = layer_parameter_name(programs_.config, chunk_.first_layer + idx, "");
  const auto grad = gradients_of(parameters_, prefix);
  layer.kind = &programs_.kind_of(chunk_.first_layer + idx);
  const DerivedProgram& program = layer.kind->derived;
  layer.saved = Buffer(program.forward.plan().saved_bytes, "saved activations", device());
  layer.forward = join(program.forward, prefix, program.forward.make_bindings());
  Bindings& forward = layer.forward.bindings;
  forward.saved = layer.saved.data();
  bind_weights(program.forward.program(), weights_of(parameters_, prefix), forward);
  bind_layer_inputs(idx, layer);
  bind_layer_outputs(idx, layer);
  layer.backward = join(program.backward, prefix, bind_backward(program, forward, grad));
  bind_layer_gradients(idx, layer);
  if (!program.weights) return;
  layer.kept =
      Buffer(program.backward.plan().saved_bytes, "gradients kept for the weights'", device());
  layer.backward.bindings.saved = layer.kept.data();
  layer.weights = join(program.weights->program, prefix,
                       bind_weight_pass(program, forward, layer.backward.bindings, grad));
}

void ChunkBinder::bind_layer_inputs(int64_t idx, BoundLayer& layer) {
  const LayerProgram& layout = layer.kind->layout;
  slot(layer.forward.bindings, layout.hidden) = memory_.stream(layer_input(idx));
  if (is_mtp(idx)) {
    const int64_t mtp = idx - chunk_.num_layers;
    const BatchInputs::Prediction& prediction =
        memory_.inputs.predictions[static_cast<size_t>(memory_.streams.before + mtp)];
    const Tensor embedded = memory_.stream(memory_.streams.embedded(mtp));
    slot(layer.forward.bindings, layout.embedded) = embedded;
    bind_embedding(prediction.tokens, embedded, memory_.stream(memory_.streams.grad_embedded(mtp)),
                   layer.embedding);
  }
  slot(layer.forward.bindings, layout.positions) = memory_.inputs.positions;
  slot(layer.forward.bindings, layout.cu_seqlens) = memory_.inputs.cu_seqlens;
  bind_if(layer.forward.bindings, layout.segments, memory_.inputs.segments);
  bind_if(layer.forward.bindings, layout.token_order, memory_.inputs.token_order);
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

void ChunkBinder::bind_layer_outputs(int64_t idx, BoundLayer& layer) {
  const LayerProgram& layout = layer.kind->layout;
  slot(layer.forward.bindings, layout.hidden_out) = memory_.stream(layer_input(idx) + 1);
  if (layer.experts == nullptr) return;
  const LayerStatistics statistics = memory_.statistics.layer(layer.moe_idx);
  slot(layer.forward.bindings, layout.balance_loss) = statistics.balance_loss;
  slot(layer.forward.bindings, layout.z_loss) = statistics.z_loss;
  slot(layer.forward.bindings, layout.score_means) = statistics.score_means;
  slot(layer.forward.bindings, layout.counts) = statistics.counts;
  slot(layer.forward.bindings, layout.dropped) = statistics.dropped;
  // In place: the next micro-batch goes on from there.
  bind_if(layer.forward.bindings, layout.counts_so_far, layer.experts->earlier_counts);
}

void ChunkBinder::bind_layer_gradients(int64_t idx, BoundLayer& layer) {
  const LayerProgram& layout = layer.kind->layout;
  const Backward& derived = layer.kind->derived.derived;
  Bindings& bindings = layer.backward.bindings;
  const int64_t input = layer_input(idx);
  slot(bindings, backward_of(derived.grad_inputs, layout.hidden)) =
      memory_.stream(memory_.streams.grad(input));
  slot(bindings, backward_of(derived.grad_outputs, layout.hidden_out)) =
      memory_.stream(memory_.streams.grad(input + 1));
  if (is_mtp(idx)) {
    slot(bindings, backward_of(derived.grad_outputs, layout.hidden)) =
        memory_.grad_out(input - chunk_.num_layers);
    slot(bindings, backward_of(derived.grad_inputs, layout.embedded)) =
        memory_.stream(memory_.streams.grad_embedded(idx - chunk_.num_layers));
  }
  if (layer.experts == nullptr) return;
  const bool whole = balances_whole_model(programs_.config);
  slot(bindings,
       backward_of(derived.grad_outputs, whole ? layout.score_means : layout.balance_loss)) =
      whole ? memory_.balance.grad_score_means() : memory_.inputs.grad_balance;
  slot(bindings, backward_of(derived.grad_outputs, layout.z_loss)) = memory_.inputs.grad_z_loss;
}

}  // namespace

ChunkMemory::ChunkMemory(const StagePrograms& programs, const PipelineChunk& chunk)
    : streams(programs, chunk),
      inputs(programs.shape, programs.part.groups, programs.config, programs.backend.device()),
      statistics(count_moe_layers(programs.config, chunk), programs.config.moe.num_experts,
                 chunk.loss ? 1 + programs.config.mtp_layers : 0, programs.backend.device()),
      balance(programs.config, programs.part.groups, programs.backend.device()),
      hidden(streams.count() * programs.hidden_bytes(), "hidden states", programs.backend.device()),
      hidden_shape(programs.hidden_shape()),
      dtype(programs.shape.dtype) {}

Tensor ChunkMemory::stream(int64_t idx) const {
  const int64_t bytes = align_up(hidden_shape.num_elements() * dtype_size(dtype));
  return hidden.tensor(idx * bytes, dtype, hidden_shape);
}

BoundChunk bind_chunk(const StagePrograms& programs, const PipelineChunk& chunk,
                      const ChunkMemory& memory, const ParameterSet& parameters,
                      std::vector<ExpertState>& experts, const SharedMemory& shared) {
  return ChunkBinder(programs, chunk, memory, parameters, shared).bind(experts);
}

}  // namespace tessera
