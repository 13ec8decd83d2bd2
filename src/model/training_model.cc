#include "model/training_model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

namespace tessera {
namespace {

bool balances_whole_model(const ModelConfig& config) {
  return config.moe.balance_scope == BalanceTokens::kModel;
}

Tensor& slot(Bindings& bindings, ValueId id) {
  return bindings.tensors[static_cast<size_t>(id)];
}

ValueId backward_of(const std::vector<Link>& links, ValueId forward) {
  const auto found = std::ranges::find(links, forward, &Link::forward);
  ensure(found != links.end(), "forward value {} has no counterpart in the backward program",
         forward);
  return found->backward;
}

void copy_into(const Tensor& from, const Tensor& to, std::string_view what) {
  ensure(from.dtype == to.dtype && from.shape == to.shape, "batch {} is {} {}, expected {} {}",
         what, dtype_name(from.dtype), from.shape.to_string(), dtype_name(to.dtype),
         to.shape.to_string());
  std::memcpy(to.data, from.data, static_cast<size_t>(to.num_bytes()));
}

void set_scalar(const OwnedTensor& tensor, float value) {
  *tensor.get().as<float>() = value;
}
float get_scalar(const OwnedTensor& tensor) {
  return *tensor.get().as<float>();
}

/// The layer program of one kind, differentiated.
struct KindProgram {
  LayerProgram layout;  // its forward program lives in `derived`
  DerivedProgram derived;
};

KindProgram make_kind_program(const ModelConfig& config, LayerKind kind, const BatchShape& shape,
                              const RecomputePolicy& policy, const KernelTable& kernels) {
  LayerProgram layout = build_layer(config, kind, shape);
  DifferentiateRequest request{{layout.hidden_out}, {layout.hidden}};
  if (kind.moe) {
    request.outputs.push_back(layout.z_loss);
    request.outputs.push_back(balances_whole_model(config) ? layout.score_means
                                                           : layout.balance_loss);
  }
  Program forward = std::exchange(layout.forward, Program());
  return {std::move(layout), derive(std::move(forward), request, policy, kernels)};
}

/// What the passes over one layer need; the tensors' addresses never change after binding.
struct BoundLayer {
  const KindProgram* kind = nullptr;
  ExpertState* experts = nullptr;  // null for a dense layer
  Bindings forward;
  Bindings backward;
  Buffer saved;
  OwnedTensor balance_loss, z_loss, score_means, counts, dropped;
};

/// The arrays of the micro-batch in hand, and the scalars that its programs read.
struct Inputs {
  OwnedTensor tokens, labels, positions, cu_seqlens;
  OwnedTensor loss_scale, grad_loss, grad_balance, grad_score_means, grad_z_loss, loss, token_loss;

  static int64_t count_bytes(const BatchShape& shape) {
    return 4 * shape.num_tokens * dtype_size(DType::kI32) +
           (shape.max_sequences + 1) * dtype_size(DType::kI32);
  }
  Inputs(const BatchShape& shape, int64_t num_experts)
      : tokens(DType::kI32, {shape.num_tokens}),
        labels(DType::kI32, {shape.num_tokens}),
        positions(DType::kI32, {shape.num_tokens}),
        cu_seqlens(DType::kI32, {shape.max_sequences + 1}),
        loss_scale(DType::kF32, {1}),
        grad_loss(DType::kF32, {1}),
        grad_balance(DType::kF32, {1}),
        grad_score_means(DType::kF32, {num_experts}),
        grad_z_loss(DType::kF32, {1}),
        loss(DType::kF32, {1}),
        token_loss(DType::kF32, {shape.num_tokens}) {}
};

}  // namespace

struct TrainingModel::Impl {
  ModelConfig config;
  BatchShape shape;
  EmbeddingProgram embedding_layout;
  HeadProgram head_layout;
  HeadProgram evaluation_layout;
  std::unique_ptr<DerivedProgram> embedding;
  std::unique_ptr<DerivedProgram> head;
  std::unique_ptr<CpuProgram> evaluation_head;
  std::map<LayerKind, KindProgram> kinds;
  double model_flops = 0;

  std::unique_ptr<Inputs> inputs;
  Buffer transient;
  Buffer hidden;  // (num_layers + 1) residual streams, then two gradients of one
  Buffer head_saved;
  Bindings embedding_forward, embedding_backward, head_forward, head_backward, evaluation_forward;
  std::vector<BoundLayer> layers;

  Impl(const ModelConfig& model, const BatchShape& batch, const RecomputePolicy& policy,
       const KernelTable& kernels)
      : config(model), shape(batch) {
    build_ends(kernels);
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      const LayerKind kind = config.layer_kind(layer);
      if (!kinds.contains(kind))
        kinds.emplace(kind, make_kind_program(config, kind, shape, policy, kernels));
    }
    std::vector<const DerivedProgram*> programs;
    programs.reserve(kinds.size());
    for (const auto& [kind, program] : kinds) programs.push_back(&program.derived);
    check_recompute_names(policy, programs);
    model_flops = embedding->model_flops + head->model_flops;
    for (int64_t layer = 0; layer < config.num_layers; ++layer)
      model_flops += kind_of(layer).derived.model_flops;
  }

  void build_ends(const KernelTable& kernels) {
    embedding_layout = build_embedding(config, shape);
    embedding =
        std::make_unique<DerivedProgram>(derive(std::exchange(embedding_layout.forward, Program()),
                                                {{embedding_layout.hidden_out}, {}}, {}, kernels));
    head_layout = build_head(config, shape, true);
    head = std::make_unique<DerivedProgram>(derive(std::exchange(head_layout.forward, Program()),
                                                   {{head_layout.loss}, {head_layout.hidden}}, {},
                                                   kernels));
    evaluation_layout = build_head(config, shape, false);
    evaluation_head =
        std::make_unique<CpuProgram>(std::exchange(evaluation_layout.forward, Program()), kernels);
  }

  const KindProgram& kind_of(int64_t layer) const { return kinds.at(config.layer_kind(layer)); }
  Shape hidden_shape() const { return {shape.num_tokens, config.hidden_size}; }
  int64_t hidden_bytes() const {
    return align_up(hidden_shape().num_elements() * dtype_size(shape.dtype));
  }
  int64_t transient_bytes() const {
    int64_t bytes =
        std::max({embedding->forward.plan().transient_bytes,
                  embedding->backward.plan().transient_bytes, head->forward.plan().transient_bytes,
                  head->backward.plan().transient_bytes, evaluation_head->plan().transient_bytes});
    for (const auto& [kind, program] : kinds) {
      bytes = std::max({bytes, program.derived.forward.plan().transient_bytes,
                        program.derived.backward.plan().transient_bytes});
    }
    return bytes;
  }
  ActivationBytes count_bytes() const {
    ActivationBytes bytes{.hidden = (config.num_layers + 3) * hidden_bytes(),
                          .transient = transient_bytes(),
                          .inputs = Inputs::count_bytes(shape)};
    bytes.saved = head->forward.plan().saved_bytes;
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      bytes.saved += kind_of(layer).derived.forward.plan().saved_bytes;
    }
    return bytes;
  }

  /// The residual stream that enters layer `idx`; idx = num_layers is what the head reads.
  Tensor stream(int64_t idx) const {
    return hidden.tensor(idx * hidden_bytes(), shape.dtype, hidden_shape());
  }
  /// The gradient of the residual stream; two take turns.
  Tensor grad_stream(int64_t idx) const { return stream(config.num_layers + 1 + idx % 2); }

  void bind(ParameterSet& parameters, std::vector<ExpertState>& experts);
  void bind_embedding(const TensorByName& weight, const TensorByName& grad);
  void bind_head(const TensorByName& weight, const TensorByName& grad);
  void bind_layer(int64_t idx, ExpertState* experts, const TensorByName& weight,
                  const TensorByName& grad);
  void bind_layer_outputs(int64_t idx, BoundLayer& layer);
  void bind_layer_gradients(int64_t idx, BoundLayer& layer);
  void load(const MicroBatch& batch);
  void run_layers(const NodeObserver& observer);
  void run_backward(const NodeObserver& observer);
  double balance_model(float scale);
  MicroBatchResult collect();
};

void TrainingModel::Impl::bind(ParameterSet& parameters, std::vector<ExpertState>& experts) {
  inputs = std::make_unique<Inputs>(shape, config.moe.num_experts);
  set_scalar(inputs->grad_loss, 1);
  transient = Buffer(transient_bytes(), "working memory of the layers");
  hidden = Buffer((config.num_layers + 3) * hidden_bytes(), "hidden states");
  const TensorByName weight = [&](const std::string& name) { return parameters.find(name).weight; };
  const TensorByName grad = [&](const std::string& name) { return parameters.find(name).grad; };
  bind_embedding(weight, grad);
  bind_head(weight, grad);
  layers.clear();
  layers.resize(static_cast<size_t>(config.num_layers));
  size_t next_experts = 0;
  for (int64_t idx = 0; idx < config.num_layers; ++idx) {
    const std::string prefix = layer_parameter_name(idx, "");
    bind_layer(
        idx, config.is_moe_layer(idx) ? &experts.at(next_experts++) : nullptr,
        [&](const std::string& name) { return weight(prefix + name); },
        [&](const std::string& name) { return grad(prefix + name); });
  }
}

void TrainingModel::Impl::bind_embedding(const TensorByName& weight, const TensorByName& grad) {
  embedding_forward = embedding->forward.make_bindings();
  embedding_forward.transient = transient.data();
  bind_weights(embedding->forward.program(), weight, embedding_forward);
  slot(embedding_forward, embedding_layout.tokens) = inputs->tokens;
  slot(embedding_forward, embedding_layout.hidden_out) = stream(0);
  embedding_backward = bind_backward(*embedding, embedding_forward, grad);
  embedding_backward.transient = transient.data();
  slot(embedding_backward,
       backward_of(embedding->derived.grad_outputs, embedding_layout.hidden_out)) = grad_stream(0);
}

void TrainingModel::Impl::bind_head(const TensorByName& weight, const TensorByName& grad) {
  const auto bind_inputs = [&](const Program& program, const HeadProgram& layout,
                               Bindings& bindings) {
    bind_weights(program, weight, bindings);
    bindings.transient = transient.data();
    slot(bindings, layout.hidden) = stream(config.num_layers);
    slot(bindings, layout.labels) = inputs->labels;
    slot(bindings, layout.scale) = inputs->loss_scale;
    slot(bindings, layout.loss) = inputs->loss;
    slot(bindings, layout.token_loss) = inputs->token_loss;
  };
  evaluation_forward = evaluation_head->make_bindings();
  bind_inputs(evaluation_head->program(), evaluation_layout, evaluation_forward);

  head_saved = Buffer(head->forward.plan().saved_bytes, "saved activations of the head");
  head_forward = head->forward.make_bindings();
  bind_inputs(head->forward.program(), head_layout, head_forward);
  head_forward.saved = head_saved.data();
  const Program& program = head->forward.program();
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kAccumulator) slot(head_forward, id) = grad(value.name.substr(5));
  }
  head_backward = bind_backward(*head, head_forward, grad);
  head_backward.transient = transient.data();
  slot(head_backward, backward_of(head->derived.grad_outputs, head_layout.loss)) =
      inputs->grad_loss;
  slot(head_backward, backward_of(head->derived.grad_inputs, head_layout.hidden)) =
      grad_stream(config.num_layers);
}

void TrainingModel::Impl::bind_layer(int64_t idx, ExpertState* experts, const TensorByName& weight,
                                     const TensorByName& grad) {
  BoundLayer& layer = layers[static_cast<size_t>(idx)];
  layer.kind = &kind_of(idx);
  layer.experts = experts;
  const CpuProgram& forward = layer.kind->derived.forward;
  layer.saved = Buffer(forward.plan().saved_bytes, "saved activations");
  layer.forward = forward.make_bindings();
  layer.forward.saved = layer.saved.data();
  layer.forward.transient = transient.data();
  bind_weights(forward.program(), weight, layer.forward);
  const LayerProgram& layout = layer.kind->layout;
  slot(layer.forward, layout.hidden) = stream(idx);
  slot(layer.forward, layout.positions) = inputs->positions;
  slot(layer.forward, layout.cu_seqlens) = inputs->cu_seqlens;
  if (layout.expert_bias >= 0) slot(layer.forward, layout.expert_bias) = experts->bias;
  if (layout.prior_counts >= 0) slot(layer.forward, layout.prior_counts) = experts->step_counts;
  bind_layer_outputs(idx, layer);
  layer.backward = bind_backward(layer.kind->derived, layer.forward, grad);
  layer.backward.transient = transient.data();
  bind_layer_gradients(idx, layer);
}

void TrainingModel::Impl::bind_layer_outputs(int64_t idx, BoundLayer& layer) {
  const LayerProgram& layout = layer.kind->layout;
  slot(layer.forward, layout.hidden_out) = stream(idx + 1);
  if (layer.experts == nullptr) return;
  layer.balance_loss = OwnedTensor(DType::kF32, {1});
  layer.z_loss = OwnedTensor(DType::kF32, {1});
  layer.score_means = OwnedTensor(DType::kF32, {config.moe.num_experts});
  layer.counts = OwnedTensor(DType::kF32, {config.moe.num_experts});
  layer.dropped = OwnedTensor(DType::kI64, {1});
  slot(layer.forward, layout.balance_loss) = layer.balance_loss;
  slot(layer.forward, layout.z_loss) = layer.z_loss;
  slot(layer.forward, layout.score_means) = layer.score_means;
  slot(layer.forward, layout.counts) = layer.counts;
  slot(layer.forward, layout.dropped) = layer.dropped;
}

void TrainingModel::Impl::bind_layer_gradients(int64_t idx, BoundLayer& layer) {
  const LayerProgram& layout = layer.kind->layout;
  const Backward& derived = layer.kind->derived.derived;
  slot(layer.backward, backward_of(derived.grad_outputs, layout.hidden_out)) = grad_stream(idx + 1);
  slot(layer.backward, backward_of(derived.grad_inputs, layout.hidden)) = grad_stream(idx);
  if (layer.experts == nullptr) return;
  if (balances_whole_model(config)) {
    slot(layer.backward, backward_of(derived.grad_outputs, layout.score_means)) =
        inputs->grad_score_means;
  } else {
    slot(layer.backward, backward_of(derived.grad_outputs, layout.balance_loss)) =
        inputs->grad_balance;
  }
  slot(layer.backward, backward_of(derived.grad_outputs, layout.z_loss)) = inputs->grad_z_loss;
}

void TrainingModel::Impl::load(const MicroBatch& batch) {
  copy_into(batch.tokens, inputs->tokens, "tokens");
  copy_into(batch.labels, inputs->labels, "labels");
  copy_into(batch.positions, inputs->positions, "positions");
  copy_into(batch.cu_seqlens, inputs->cu_seqlens, "cu_seqlens");
}

void TrainingModel::Impl::run_layers(const NodeObserver& observer) {
  embedding->forward.run(embedding_forward, observer);
  for (const BoundLayer& layer : layers) layer.kind->derived.forward.run(layer.forward, observer);
}

void TrainingModel::Impl::run_backward(const NodeObserver& observer) {
  head->backward.run(head_backward, observer);
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
    layer->kind->derived.backward.run(layer->backward, observer);
  }
  embedding->backward.run(embedding_backward, observer);
}

/// The balance loss over all layers together, E · Σ_e f_e·P_e with f_e and P_e their means over the
/// layers; `scale` times its gradient is left for every layer's score means.
double TrainingModel::Impl::balance_model(float scale) {
  const auto num_experts = static_cast<size_t>(config.moe.num_experts);
  std::vector<double> counts(num_experts, 0.0);
  std::vector<double> means(num_experts, 0.0);
  for (const BoundLayer& layer : layers) {
    if (layer.experts == nullptr) continue;
    for (size_t e = 0; e < num_experts; ++e) {
      counts[e] += layer.counts.get().span<float>()[e];
      means[e] += layer.score_means.get().span<float>()[e];
    }
  }
  const double assignments = std::max(std::reduce(counts.begin(), counts.end()), 1.0);
  const double per_layer = static_cast<double>(num_experts) /
                           static_cast<double>(std::max<int64_t>(config.num_moe_layers(), 1));
  const auto gradient = inputs->grad_score_means.get().span<float>();
  double loss = 0;
  for (size_t e = 0; e < num_experts; ++e) {
    const double fraction = counts[e] / assignments;
    loss += per_layer * fraction * means[e];
    gradient[e] = static_cast<float>(scale * per_layer * fraction);
  }
  return loss;
}

MicroBatchResult TrainingModel::Impl::collect() {
  MicroBatchResult result{.loss = get_scalar(inputs->loss)};
  const auto num_moe = static_cast<double>(std::max<int64_t>(config.num_moe_layers(), 1));
  for (BoundLayer& layer : layers) {
    if (layer.experts == nullptr) continue;
    result.balance_loss += get_scalar(layer.balance_loss) / num_moe;
    result.z_loss += get_scalar(layer.z_loss) / num_moe;
    result.dropped += *layer.dropped.get().as<int64_t>();
    const auto counts = layer.counts.get().span<float>();
    const auto step_counts = layer.experts->step_counts.get().span<float>();
    for (size_t e = 0; e < counts.size(); ++e) step_counts[e] += counts[e];
  }
  return result;
}

TrainingModel::TrainingModel(const ModelConfig& config, const BatchShape& shape,
                             const RecomputePolicy& policy, const KernelTable& kernels)
    : impl_(std::make_unique<Impl>(config, shape, policy, kernels)) {}

TrainingModel::~TrainingModel() = default;

const BatchShape& TrainingModel::batch_shape() const {
  return impl_->shape;
}
ActivationBytes TrainingModel::activation_bytes() const {
  return impl_->count_bytes();
}
double TrainingModel::model_flops() const {
  return impl_->model_flops;
}

void TrainingModel::bind(ParameterSet& parameters, std::vector<ExpertState>& experts) {
  impl_->bind(parameters, experts);
}

void TrainingModel::begin_step() {
  for (BoundLayer& layer : impl_->layers) {
    if (layer.experts != nullptr)
      std::ranges::fill(layer.experts->step_counts.get().span<float>(), 0.0F);
  }
}

MicroBatchResult TrainingModel::run(const MicroBatch& batch, const LossScales& scales,
                                    const NodeObserver& observer) {
  Impl& impl = *impl_;
  ensure(impl.inputs != nullptr, "TrainingModel::run before bind");
  impl.load(batch);
  set_scalar(impl.inputs->loss_scale, scales.loss);
  set_scalar(impl.inputs->grad_balance, scales.balance);
  set_scalar(impl.inputs->grad_z_loss, scales.z_loss);
  impl.run_layers(observer);
  impl.head->forward.run(impl.head_forward, observer);
  const double model_balance =
      balances_whole_model(impl.config) ? impl.balance_model(scales.balance) : 0;
  impl.run_backward(observer);
  MicroBatchResult result = impl.collect();
  if (balances_whole_model(impl.config)) result.balance_loss = model_balance;
  return result;
}

double TrainingModel::evaluate(const MicroBatch& batch, const NodeObserver& observer) {
  Impl& impl = *impl_;
  ensure(impl.inputs != nullptr, "TrainingModel::evaluate before bind");
  impl.load(batch);
  set_scalar(impl.inputs->loss_scale, 1);
  impl.run_layers(observer);
  impl.evaluation_head->run(impl.evaluation_forward, observer);
  return get_scalar(impl.inputs->loss);
}

std::vector<std::vector<double>> TrainingModel::last_counts() const {
  std::vector<std::vector<double>> result;
  for (const BoundLayer& layer : impl_->layers) {
    if (layer.experts == nullptr) continue;
    const auto counts = layer.counts.get().span<float>();
    result.emplace_back(counts.begin(), counts.end());
  }
  return result;
}

std::vector<LayerKind> TrainingModel::layer_kinds() const {
  std::vector<LayerKind> result;
  result.reserve(impl_->kinds.size());
  for (const auto& [kind, program] : impl_->kinds) result.push_back(kind);
  return result;
}

const DerivedProgram& TrainingModel::layer_program(LayerKind kind) const {
  const auto found = impl_->kinds.find(kind);
  ensure(found != impl_->kinds.end(), "the model has no such layer");
  return found->second.derived;
}

}  // namespace tessera
