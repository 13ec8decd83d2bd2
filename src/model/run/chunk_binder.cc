#include "model/run/chunk_binder.h"

namespace tessera {
namespace {

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
              const ChunkState& state)
      : programs_(programs),
        chunk_(chunk),
        memory_(memory),
        parameters_(state.parameters),
        copies_(state.weight_copies),
        roundings_(state.roundings),
        stash_(state.stash),
        slabs_(state.slabs) {}

  BoundChunk bind(std::vector<ExpertState>& experts);

 private:
  Device& device() const { return programs_.backend.device(); }
  bool is_mtp(int64_t idx) const { return idx >= chunk_.num_layers; }
  Tensor stream(int64_t idx) const { return memory_.stream(idx); }
  /// Which of the hidden states layer `idx` of the chunk reads.
  int64_t layer_input(int64_t idx) const { return memory_.streams.before + idx; }
  LayerBinder binder(const WeightNames& names = {}, const CopyTensors* copies = nullptr) const {
    std::byte* const working = slabs_.transient().data();
    return {parameters_,
            names,
            {working, working + programs_.backward_working()},
            slabs_.is_by_page() ? &slabs_ : nullptr,
            copies};
  }
  BoundPasses bind_embedding(const PortTensors& inputs, const Tensor& hidden,
                             const Tensor& grad) const;
  PortTensors head_ports(int64_t depth) const;
  BoundPasses bind_head(int64_t depth) const;
  void bind_layers(std::vector<ExpertState>& experts);
  void bind_layer(int64_t idx);
  PortTensors layer_ports(int64_t idx, BoundLayer& layer) const;
  void set_expert_ports(BoundLayer& layer, PortTensors& ports) const;
  int64_t moe_layers_before(int64_t layer) const;
  PortGradients layer_gradients(int64_t idx) const;

  const StagePrograms& programs_;
  const PipelineChunk& chunk_;
  const ChunkMemory& memory_;
  const ParameterSet& parameters_;
  const LayerCopies& copies_;
  const RoundingTables& roundings_;
  const StashPool* stash_;
  ElasticSlabs& slabs_;
  BoundChunk bound_;
};

BoundChunk ChunkBinder::bind(std::vector<ExpertState>& experts) {
  if (chunk_.embedding) {
    bound_.embedding = bind_embedding(memory_.inputs.ports(), stream(memory_.streams.hidden(0)),
                                      stream(memory_.streams.grad(0)));
  }
  if (chunk_.loss) {
    bound_.evaluation = binder().bind_forward(*programs_.evaluation_head,
                                              programs_.evaluation_layout, head_ports(0));
    for (int64_t depth = 0; depth < std::ssize(programs_.heads); ++depth)
      bound_.heads.push_back(bind_head(depth));
  }
  bind_layers(experts);
  return std::move(bound_);
}

int64_t ChunkBinder::moe_layers_before(int64_t layer) const {
  int64_t count = 0;
  for (int64_t i = 0; i < layer; ++i) count += programs_.config.is_moe_layer(i) ? 1 : 0;
  return count;
}

void ChunkBinder::bind_layers(std::vector<ExpertState>& experts) {
  bound_.layers.resize(chunk_.all_layers());
  auto next_experts = static_cast<size_t>(moe_layers_before(chunk_.first_layer));
  int64_t next_moe = 0;
  for (int64_t i = 0; i < chunk_.all_layers(); ++i) {
    BoundLayer& layer = bound_.layers[i];
    if (programs_.config.is_moe_layer(chunk_.first_layer + i)) {
      layer.experts = &experts.at(next_experts++);
      layer.moe_idx = next_moe++;
    }
    bind_layer(i);
  }
}

BoundPasses ChunkBinder::bind_embedding(const PortTensors& inputs, const Tensor& hidden,
                                        const Tensor& grad) const {
  const DerivedProgram& program = *programs_.embedding;
  const ModelProgram& layout = programs_.embedding_layout;
  PortTensors ports = inputs;
  ports.set(Port::kHiddenOut, hidden);
  PortGradients gradients;
  gradients.given.set(Port::kHiddenOut, grad);
  BoundPasses passes;
  passes.forward = binder().bind_forward(program.forward, layout, ports);
  passes.backward = binder().bind_backward(program, layout, passes.forward.bindings, gradients);
  return passes;
}

PortTensors ChunkBinder::head_ports(int64_t depth) const {
  PortTensors ports =
      depth == 0 ? memory_.inputs.ports() : memory_.inputs.prediction_ports(depth - 1);
  ports.set(Port::kHidden, memory_.hidden_out(depth));
  ports.set(Port::kLoss, memory_.statistics.loss(depth));
  return ports;
}

BoundPasses ChunkBinder::bind_head(int64_t depth) const {
  const auto& [layout, derived] = programs_.heads[depth];
  PortGradients gradients;
  gradients.given.set(Port::kLoss, memory_.inputs.grad_loss);
  gradients.wanted.set(Port::kHidden, memory_.grad_out(depth));
  BoundPasses passes;
  passes.forward = binder().bind_forward(derived.forward, layout, head_ports(depth),
                                         memory_.saved_at(memory_.saved_offsets.heads, depth));
  passes.backward = binder().bind_backward(derived, layout, passes.forward.bindings, gradients);
  return passes;
}

void ChunkBinder::bind_layer(int64_t idx) {
  BoundLayer& layer = bound_.layers[idx];
  const int64_t number = chunk_.first_layer + idx;
  layer.kind = &programs_.kind_of(number);
  const auto& [layout, derived] = *layer.kind;
  CopyTensors named = copies_.of_layer(number);
  named.merge(roundings_.of_layer(number));
  if (stash_ != nullptr) named.merge(stash_->tensors());
  const LayerBinder binder = this->binder({&programs_.config, number}, &named);
  if (derived.weight_copies) layer.copies = binder.bind_copies(derived);
  layer.forward = binder.bind_forward(derived.forward, layout, layer_ports(idx, layer),
                                      memory_.saved_at(memory_.saved_offsets.layers, idx),
                                      memory_.saved_at(memory_.saved_offsets.offloaded, idx));
  layer.backward =
      binder.bind_backward(derived, layout, layer.forward.bindings, layer_gradients(idx),
                           memory_.saved_at(memory_.saved_offsets.kept, idx));
  if (derived.weights)
    layer.weights = binder.bind_weights(derived, layer.forward.bindings, layer.backward.bindings);
}

PortTensors ChunkBinder::layer_ports(int64_t idx, BoundLayer& layer) const {
  PortTensors ports = memory_.inputs.ports();
  ports.set(Port::kHidden, stream(layer_input(idx)));
  ports.set(Port::kHiddenOut, stream(layer_input(idx) + 1));
  if (is_mtp(idx)) {
    const int64_t mtp = idx - chunk_.num_layers;
    const Tensor embedded = stream(memory_.streams.embedded(mtp));
    ports.set(Port::kEmbedded, embedded);
    layer.embedding = bind_embedding(memory_.inputs.prediction_ports(memory_.streams.before + mtp),
                                     embedded, stream(memory_.streams.grad_embedded(mtp)));
  }
  if (programs_.shape.qk_clip > 0) ports.set(Port::kMaxLogits, memory_.statistics.max_logits(idx));
  if (layer.experts != nullptr) set_expert_ports(layer, ports);
  return ports;
}

void ChunkBinder::set_expert_ports(BoundLayer& layer, PortTensors& ports) const {
  memory_.statistics.layer(layer.moe_idx).set_ports(ports);
  const int64_t moe_layer = moe_layers_before(chunk_.first_layer) + layer.moe_idx;
  ports.set(Port::kReplayedExperts, memory_.inputs.experts_of(moe_layer));
  ports.set(Port::kNoise, memory_.inputs.noise_of(moe_layer));
  ports.set(Port::kEarlierCounts, layer.experts->earlier_counts);
  // In place: the next micro-batch goes on from there.
  ports.set(Port::kCountsSoFar, layer.experts->earlier_counts);
  ports.set(Port::kExpertBias, layer.experts->bias);
  if (device().is_host() || !layer.kind->layout.has(Port::kExpertBias)) return;
  const Shape shape{programs_.config.moe.router_outputs()};
  layer.expert_bias = OwnedTensor(DType::kF32, shape, "expert biases", device());
  ports.set(Port::kExpertBias, layer.expert_bias);
}

PortGradients ChunkBinder::layer_gradients(int64_t idx) const {
  const int64_t input = layer_input(idx);
  PortGradients gradients;
  gradients.given.set(Port::kHiddenOut, stream(memory_.streams.grad(input + 1)));
  gradients.given.set(Port::kBalanceLoss, memory_.inputs.grad_balance);
  gradients.given.set(Port::kScoreMeans, memory_.balance.grad_score_means());
  gradients.given.set(Port::kZLoss, memory_.inputs.grad_z_loss);
  gradients.wanted.set(Port::kHidden, stream(memory_.streams.grad(input)));
  if (!is_mtp(idx)) return gradients;
  const int64_t mtp = idx - chunk_.num_layers;
  gradients.given.set(Port::kHidden, memory_.grad_out(input - chunk_.num_layers));
  gradients.wanted.set(Port::kEmbedded, stream(memory_.streams.grad_embedded(mtp)));
  return gradients;
}

/// What the programs of a chunk leave for the host.
StatisticsSizes count_statistics(const StagePrograms& programs, const PipelineChunk& chunk) {
  const bool measures = programs.shape.qk_clip > 0;
  return {.moe_layers = count_moe_layers(programs.config, chunk),
          .num_experts = programs.config.moe.router_outputs(),
          .num_losses = chunk.loss ? 1 + programs.config.mtp_layers : 0,
          .logit_layers = measures ? chunk.all_layers() : 0,
          .num_heads = measures ? attended_heads(programs.config, programs.part.groups).count : 0};
}

}  // namespace

ChunkMemory::ChunkMemory(const StagePrograms& programs, const PipelineChunk& chunk,
                         const ElasticSlabs& slabs, SavedOffsets offsets)
    : streams(programs, chunk),
      inputs(programs.shape, programs.part.groups, programs.config, programs.backend.device()),
      statistics(count_statistics(programs, chunk), programs.backend.device()),
      balance(programs.config, programs.part.groups, programs.backend.device()),
      hidden(streams.count() * programs.hidden_bytes(), "hidden states", programs.backend.device()),
      hidden_shape(programs.hidden_shape()),
      dtype(programs.shape.dtype),
      saved(slabs.saved().data()),
      saved_offsets(std::move(offsets)) {}

Tensor ChunkMemory::stream(int64_t idx) const {
  const int64_t bytes = align_up(hidden_shape.num_elements() * dtype_size(dtype));
  return hidden.tensor(idx * bytes, dtype, hidden_shape);
}

BoundChunk bind_chunk(const StagePrograms& programs, const PipelineChunk& chunk,
                      const ChunkMemory& memory, const ChunkState& state) {
  return ChunkBinder(programs, chunk, memory, state).bind(state.experts);
}

}  // namespace tessera
