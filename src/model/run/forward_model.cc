#include "model/run/forward_model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include "core/mirrored_tensor.h"
#include "program/fuse_gathers.h"
#include "program/fuse_producers.h"
#include "program/fuse_sums.h"

namespace tessera {
namespace {

Tensor& tensor_of(Bindings& bindings, ValueId id) {
  return bindings.tensors[static_cast<size_t>(id)];
}

/// The configuration without what only matters in training.
ModelConfig for_inference(ModelConfig config) {
  config.moe.capacity_factor = 0;
  config.moe.pad_to_capacity = false;
  config.moe.balance_scope = BalanceTokens::kMicroBatch;
  config.moe.experts =
      ExpertPath::kGrouped;  // the same weights; blocks would pad single tokens to whole blocks
  return config;
}

struct ForwardLayer {
  LayerProgram layout;
  std::unique_ptr<Executable> program;
};

ForwardLayer make_layer(const ModelConfig& config, LayerKind kind, const BatchShape& shape,
                        const std::optional<CacheShape>& cache, const Backend& backend) {
  ForwardLayer layer{build_layer(config, kind, shape, single_rank_groups(), cache), nullptr};
  Program forward = fuse_gathers(fuse_sums(std::exchange(layer.layout.forward, Program())),
                                 config.moe.fuse_gather, backend, {});
  if (config.moe.fuse_activation) forward = fuse_producers(forward);
  layer.program = std::make_unique<Executable>(std::move(forward), backend);
  return layer;
}

/// All programs of a forward pass.
struct ForwardPrograms {
  ModelConfig config;
  BatchShape shape;
  Backend backend;
  EmbeddingProgram embedding_layout;
  HeadProgram loss_layout;
  LogitsProgram logits_layout;
  std::unique_ptr<Executable> embedding;
  std::unique_ptr<Executable> head;  // of the loss or of the logits
  std::map<LayerKind, ForwardLayer> layers;

  ForwardPrograms(const ModelConfig& trained, const BatchShape& batch, ForwardGoal goal,
                  const Backend& own, const std::optional<CacheShape>& cache)
      : config(for_inference(trained)), shape(batch), backend(own) {
    embedding_layout = build_embedding(config, shape, single_rank_groups());
    embedding =
        std::make_unique<Executable>(std::exchange(embedding_layout.forward, Program()), backend);
    if (goal == ForwardGoal::kLoss) {
      loss_layout = build_head(config, shape, single_rank_groups(), false);
      head = std::make_unique<Executable>(std::exchange(loss_layout.forward, Program()), backend);
    } else {
      logits_layout = build_logits(config, shape);
      head = std::make_unique<Executable>(std::exchange(logits_layout.forward, Program()), backend);
    }
    for (int64_t idx = 0; idx < config.num_layers; ++idx) {
      const LayerKind kind = config.layer_kind(idx);
      if (!layers.contains(kind))
        layers.emplace(kind, make_layer(config, kind, shape, cache, backend));
    }
  }

  const ForwardLayer& layer_of(int64_t idx) const { return layers.at(config.layer_kind(idx)); }
  int64_t transient_bytes() const {
    int64_t bytes = std::max(embedding->plan().transient_bytes, head->plan().transient_bytes);
    for (const auto& [kind, layer] : layers)
      bytes = std::max(bytes, layer.program->plan().transient_bytes);
    return bytes;
  }
};

std::optional<CacheShape> shape_of(const KeyValueCache* cache) {
  if (cache == nullptr) return std::nullopt;
  return CacheShape{cache->capacity()};
}

}  // namespace

struct ForwardModel::Impl : ForwardPrograms {
  Impl(const ModelConfig& trained, const BatchShape& batch, ForwardGoal goal, const Backend& own,
       KeyValueCache* keys_and_values)
      : ForwardPrograms(trained, batch, goal, own, shape_of(keys_and_values)),
        cache(keys_and_values) {}

  KeyValueCache* cache;
  MirroredTensor tokens, labels, positions, cu_seqlens, start, cache_length, scale;
  OwnedTensor streams[2];
  OwnedTensor loss, result;
  OwnedTensor host_result;                 // a copy of a device's
  std::vector<OwnedTensor> expert_biases;  // copies of the host's, on a device
  OwnedTensor balance_loss, z_loss, score_means, counts, dropped;
  Buffer transient;
  Bindings embedding_bindings, head_bindings;
  std::vector<Bindings> layer_bindings;

  Device& device() const { return backend.device(); }

  void allocate_inputs() {
    const Shape row = {shape.num_tokens};
    tokens = MirroredTensor(DType::kI32, row, device());
    labels = MirroredTensor(DType::kI32, row, device());
    positions = MirroredTensor(DType::kI32, row, device());
    cu_seqlens = MirroredTensor(DType::kI32, {shape.max_sequences + 1}, device());
    start = MirroredTensor(DType::kI32, {1}, device());
    cache_length = MirroredTensor(DType::kI32, {1}, device());
    scale = MirroredTensor(DType::kF32, {1}, device());
    *scale.get().as<float>() = 1;
    scale.upload();
  }

  void allocate(ForwardGoal goal) {
    allocate_inputs();
    const auto make = [&](DType dtype, const Shape& own, std::string_view what) {
      return OwnedTensor(dtype, own, what, device());
    };
    for (OwnedTensor& stream : streams)
      stream = make(shape.dtype, {shape.num_tokens, config.hidden_size}, "hidden states");
    loss = make(DType::kF32, {1}, "the loss");
    const bool is_loss = goal == ForwardGoal::kLoss;
    const DType dtype = is_loss ? DType::kF32 : shape.dtype;
    const Shape result_shape =
        is_loss ? Shape{shape.num_tokens} : Shape{shape.num_tokens, config.vocab_size};
    result = make(dtype, result_shape, is_loss ? "losses of tokens" : "logits");
    if (!device().is_host()) host_result = OwnedTensor(dtype, result_shape, "logits on the host");
    const Shape experts = {std::max<int64_t>(config.moe.num_experts, 1)};
    balance_loss = make(DType::kF32, {1}, "the balance loss");
    z_loss = make(DType::kF32, {1}, "the z-loss");
    counts = make(DType::kF32, experts, "counts of the experts");
    score_means = make(DType::kF32, experts, "scores of the experts");
    dropped = make(DType::kI64, {1}, "the dropped assignments");
    transient = Buffer(transient_bytes(), "working memory of the layers", device());
  }

  /// The biases where the device reads them fast.
  Tensor bias_of(const ExpertState& experts) {
    const Tensor bias = experts.bias;
    if (device().is_host()) return bias;
    expert_biases.emplace_back(bias.dtype, bias.shape, "expert biases", device());
    const Tensor& copy = expert_biases.back().get();
    device().copy(copy.data, bias.data, bias.num_bytes());
    return copy;
  }

  void bind(ForwardGoal goal, ParameterSet& parameters, std::vector<ExpertState>& experts) {
    const TensorByName weight = [&](const std::string& name) {
      return parameters.find(name).weight;
    };
    embedding_bindings = embedding->make_bindings();
    embedding_bindings.transient = transient.data();
    bind_weights(embedding->program(), weight, embedding_bindings);
    tensor_of(embedding_bindings, embedding_layout.tokens) = tokens;
    tensor_of(embedding_bindings, embedding_layout.hidden_out) = streams[0];
    size_t next_experts = 0;
    for (int64_t idx = 0; idx < config.num_layers; ++idx) {
      ExpertState* state = config.is_moe_layer(idx) ? &experts.at(next_experts++) : nullptr;
      layer_bindings.push_back(bind_layer(idx, state, weight));
    }
    bind_head(goal, weight);
  }

  Bindings bind_layer(int64_t idx, ExpertState* experts, const TensorByName& weight) {
    const ForwardLayer& layer = layer_of(idx);
    const LayerProgram& layout = layer.layout;
    Bindings bindings = layer.program->make_bindings();
    bindings.transient = transient.data();
    bind_weights(
        layer.program->program(),
        [&](const std::string& name) { return weight(layer_parameter_name(idx, name)); }, bindings);
    const auto bind = [&](ValueId id, const Tensor& tensor) {
      if (id >= 0) tensor_of(bindings, id) = tensor;
    };
    bind(layout.hidden, streams[idx % 2]);
    bind(layout.hidden_out, streams[(idx + 1) % 2]);
    bind(layout.positions, positions);
    bind(layout.cu_seqlens, cu_seqlens);
    bind(layout.start, start);
    bind(layout.cache_length, cache_length);
    if (cache != nullptr) {
      bind(layout.key_cache, cache->keys(idx));
      bind(layout.value_cache, cache->values(idx));
    }
    if (experts != nullptr) bind(layout.expert_bias, bias_of(*experts));
    bind(layout.balance_loss, balance_loss);
    bind(layout.z_loss, z_loss);
    bind(layout.score_means, score_means);
    bind(layout.counts, counts);
    bind(layout.dropped, dropped);
    return bindings;
  }

  void bind_head(ForwardGoal goal, const TensorByName& weight) {
    head_bindings = head->make_bindings();
    head_bindings.transient = transient.data();
    bind_weights(head->program(), weight, head_bindings);
    const Tensor last = streams[config.num_layers % 2];
    if (goal == ForwardGoal::kLogits) {
      tensor_of(head_bindings, logits_layout.hidden) = last;
      tensor_of(head_bindings, logits_layout.logits) = result;
      return;
    }
    tensor_of(head_bindings, loss_layout.hidden) = last;
    tensor_of(head_bindings, loss_layout.labels) = labels;
    tensor_of(head_bindings, loss_layout.scale) = scale;
    tensor_of(head_bindings, loss_layout.loss) = loss;
    tensor_of(head_bindings, loss_layout.token_loss) = result;
  }

  /// The result where the host reads it, after all that was uploaded.
  Tensor run() {
    embedding->run(embedding_bindings);
    for (int64_t idx = 0; idx < config.num_layers; ++idx) {
      layer_of(idx).program->run(layer_bindings[static_cast<size_t>(idx)]);
    }
    head->run(head_bindings);
    if (device().is_host()) return result;
    const Tensor& host = host_result.get();
    device().copy(host.data, result.get().data, host.num_bytes());
    return host;
  }
};

int64_t plan_forward(const ModelConfig& config, const BatchShape& shape, ForwardGoal goal,
                     const Backend& backend, const std::optional<CacheShape>& cache) {
  return ForwardPrograms(config, shape, goal, backend, cache).transient_bytes();
}

KeyValueCache::KeyValueCache(const ModelConfig& config, DType dtype, int64_t capacity,
                             Device& device)
    : capacity_(capacity) {
  const Shape keys = {capacity, config.kv_heads() * config.head_dim()};
  const Shape values = {capacity, config.kv_heads() * config.value_dim()};
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    keys_.emplace_back(dtype, keys, "the key cache", device);
    values_.emplace_back(dtype, values, "the value cache", device);
  }
}

ForwardModel::ForwardModel(const ModelConfig& config, const BatchShape& shape, ForwardGoal goal,
                           const Backend& backend, ParameterSet& parameters,
                           std::vector<ExpertState>& experts, KeyValueCache* cache)
    : impl_(std::make_unique<Impl>(config, shape, goal, backend, cache)) {
  impl_->allocate(goal);
  impl_->bind(goal, parameters, experts);
}

ForwardModel::ForwardModel(ForwardModel&&) noexcept = default;
ForwardModel::~ForwardModel() = default;

Tensor ForwardModel::run_loss(const MicroBatch& batch) {
  const auto load = [](const Tensor& from, const MirroredTensor& to) {
    ensure(from.dtype == to.get().dtype && from.shape == to.get().shape,
           "ForwardModel: a batch of another shape");
    std::memcpy(to.get().data, from.data, static_cast<size_t>(from.num_bytes()));
    to.upload();
  };
  ensure(impl_->cache == nullptr, "run_loss with a cache");
  load(batch.tokens, impl_->tokens);
  load(batch.labels, impl_->labels);
  load(batch.positions, impl_->positions);
  load(batch.cu_seqlens, impl_->cu_seqlens);
  return impl_->run();
}

Tensor ForwardModel::run_logits(std::span<const int32_t> tokens) {
  Impl& impl = *impl_;
  ensure(impl.cache != nullptr && static_cast<int64_t>(tokens.size()) == impl.shape.num_tokens,
         "run_logits: {} tokens for a model of {}", tokens.size(), impl.shape.num_tokens);
  const int64_t begin = impl.cache->length();
  const int64_t end = begin + impl.shape.num_tokens;
  require(end <= impl.cache->capacity(), "{} tokens do not fit in a cache of {}", end,
          impl.cache->capacity());
  std::ranges::copy(tokens, impl.tokens.get().as<int32_t>());
  const auto positions = impl.positions.get().span<int32_t>();
  std::iota(positions.begin(), positions.end(), static_cast<int32_t>(begin));
  *impl.start.get().as<int32_t>() = static_cast<int32_t>(begin);
  *impl.cache_length.get().as<int32_t>() = static_cast<int32_t>(end);
  for (const MirroredTensor* given :
       {&impl.tokens, &impl.positions, &impl.start, &impl.cache_length})
    given->upload();
  const Tensor logits = impl.run();
  impl.cache->set_length(end);
  return logits;
}

}  // namespace tessera
