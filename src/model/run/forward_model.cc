#include "model/run/forward_model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include "core/mirrored_tensor.h"
#include "model/batch/position_inputs.h"
#include "model/layers/layer_program.h"
#include "model/layers/vocabulary_program.h"
#include "model/run/layer_binder.h"
#include "ops/paged_attention/paged_attention.h"
#include "program/compile/compile.h"
#include "runtime/recorded_pass.h"

namespace tessera {
namespace {

/// The configuration without what only matters in training.
ModelConfig for_inference(ModelConfig config) {
  config.moe.capacity_factor = 0;
  config.moe.pad_to_capacity = false;
  config.moe.balance_scope = BalanceTokens::kModel;  // the router's own loss alone
  config.moe.experts =
      ExpertPath::kGrouped;  // the same weights; blocks would pad single tokens to whole blocks
  return config;
}

struct ForwardLayer {
  ModelProgram layout;
  std::unique_ptr<Executable> program;
};

/// All programs of a forward pass.
struct ForwardPrograms {
  /// A kind, and the weights whose products are not rounded.
  using Key = std::pair<LayerKind, std::vector<std::string>>;

  ModelConfig config;
  BatchShape shape;
  Backend backend;
  ModelProgram embedding_layout;
  ModelProgram head_layout;  // of the loss or of the logits
  std::unique_ptr<Executable> embedding;
  std::unique_ptr<Executable> head;
  std::map<Key, ForwardLayer> layers;
  std::vector<CompileReport>* reports;  // where they are asked for

  ForwardPrograms(const ModelConfig& trained, const BatchShape& batch, ForwardGoal goal,
                  const Backend& own, const std::optional<CacheShape>& cache,
                  int64_t chosen_rows = 0, std::vector<CompileReport>* asked = nullptr)
      : config(for_inference(trained)), shape(batch), backend(own), reports(asked) {
    shape.weighted_tokens = false;  // what is told of a token is its own loss
    shape.trains = false;
    require(
        !cache || !config.moe.experts_choose() || config.num_moe_layers() == 0,
        "moe.routing = \"expert_choice\": which tokens an expert takes depends on later ones, so "
        "that the model cannot generate as it was trained; it can be trained and evaluated");
    embedding_layout = build_embedding(config, shape, single_rank_groups());
    embedding = make_executable(embedding_layout.forward, {});
    for (int64_t idx = 0; idx < config.num_layers; ++idx) {
      const Key key = key_of(idx);
      if (!layers.contains(key)) layers.emplace(key, make_layer(key, cache));
    }
    head_layout = goal == ForwardGoal::kLoss
                      ? build_head(config, shape, single_rank_groups(), false)
                      : build_logits(config, shape, chosen_rows);
    head = make_executable(head_layout.forward, {});
  }

  Key key_of(int64_t layer) const {
    return {config.layer_kind(layer), names_of_layer(shape.products.plain, layer)};
  }

  ForwardLayer make_layer(const Key& key, const std::optional<CacheShape>& cache) {
    ForwardLayer layer{build_layer(config, key.first, shape, single_rank_groups(), cache), nullptr};
    layer.program = make_executable(layer.layout.forward, shape.products.rounding(key.second));
    return layer;
  }

  /// Takes the program away.
  std::unique_ptr<Executable> make_executable(Program& program,
                                              const std::optional<OperandRounding>& rounding) {
    const CompileOptions options{.gathers = config.moe.fuse_gather,
                                 .fuse_activations = config.moe.fuse_activation,
                                 .rounding = rounding};
    if (reports != nullptr)
      reports->push_back(report_passes(program, Goal::kInfer, options, backend));
    Compiled compiled = compile(std::exchange(program, Program()), Goal::kInfer, options, backend);
    return std::make_unique<Executable>(std::move(compiled.forward), backend);
  }

  const ForwardLayer& layer_of(int64_t idx) const { return layers.at(key_of(idx)); }
  int64_t transient_bytes() const {
    int64_t bytes = std::max(embedding->plan().transient_bytes, head->plan().transient_bytes);
    for (const auto& [key, layer] : layers)
      bytes = std::max(bytes, layer.program->plan().transient_bytes);
    return bytes;
  }
};

std::optional<CacheShape> shape_of(const KeyValueCache* cache) {
  if (cache == nullptr) return std::nullopt;
  return cache->shape();
}

}  // namespace

struct ForwardModel::Impl : ForwardPrograms {
  Impl(const ModelConfig& trained, const BatchShape& batch, ForwardGoal goal, const Backend& own,
       KeyValueCache* keys_and_values, int64_t num_chosen)
      : ForwardPrograms(trained, batch, goal, own, shape_of(keys_and_values), num_chosen),
        cache(keys_and_values),
        chosen_rows(num_chosen),
        pass(own) {}

  KeyValueCache* cache;
  int64_t chosen_rows;
  RecordedPass pass;
  MirroredTensor tokens, labels, positions, cu_seqlens, start, cache_length, scale;
  MirroredTensor chunk_bounds, temperatures;           // where the model's layers have them
  MirroredTensor cache_rows, page_table, cache_slots;  // of a paged cache
  MirroredTensor rows_to_choose, rules;
  MirroredTensor replayed;          // I32 [MoE layers, T, K], where routing is replayed
  OwnedTensor chosen, host_chosen;  // the same, where it is told
  OwnedTensor streams[2];
  OwnedTensor loss, result;
  std::vector<int64_t> places;  // of the last pass's chosen rows, among those with logits
  OwnedTensor chosen_tokens, chosen_log_probabilities;
  OwnedTensor host_result;                 // a copy of a device's
  std::vector<OwnedTensor> expert_biases;  // copies of the host's, on a device
  OwnedTensor balance_loss, z_loss, score_means, counts, dropped;
  Buffer transient;
  BoundProgram bound_embedding, bound_head;
  std::vector<BoundProgram> bound_layers;

  Device& device() const { return backend.device(); }

  void allocate_inputs() {
    const Shape row = {shape.num_tokens};
    tokens = MirroredTensor(DType::kI32, row, device());
    labels = MirroredTensor(DType::kI32, row, device());
    positions = MirroredTensor(DType::kI32, row, device());
    cu_seqlens = MirroredTensor(DType::kI32, {shape.max_sequences + 1}, device());
    allocate_places(row);
    start = MirroredTensor(DType::kI32, {1}, device());
    const bool paged = cache != nullptr && cache->shape().is_paged();
    cache_length = MirroredTensor(DType::kI32, {paged ? shape.max_sequences : 1}, device());
    if (paged) {
      cache_rows = MirroredTensor(DType::kI32, row, device());
      page_table =
          MirroredTensor(DType::kI32, {shape.max_sequences, pages_of(cache->capacity())}, device());
      cache_slots = MirroredTensor(DType::kI32, {shape.max_sequences}, device());
    }
    if (chosen_rows > 0) {
      rows_to_choose = MirroredTensor(DType::kI32, {chosen_rows}, device());
      rules = MirroredTensor(DType::kU8, {chosen_rows, int64_t{sizeof(TokenRule)}}, device());
    }
    const Shape choices = {config.num_moe_layers(), shape.num_tokens, config.moe.choices()};
    if (shape.replays_routing) replayed = MirroredTensor(DType::kI32, choices, device());
    if (shape.tells_routing) {
      chosen = OwnedTensor(DType::kI32, choices, "chosen experts", device());
      if (!device().is_host()) host_chosen = OwnedTensor(DType::kI32, choices, "chosen experts");
    }
    scale = MirroredTensor(DType::kF32, {1}, device());
    *scale.get().as<float>() = 1;
    scale.upload();
  }

  /// What follows from the tokens' places in their sequences.
  void allocate_places(const Shape& row) {
    const StageGroups groups = single_rank_groups();
    const PortContext context{.config = config, .shape = shape, .groups = groups};
    if (config.has_chunks()) {
      const ValueType type = port_type(Port::kChunkBounds, context);
      chunk_bounds = MirroredTensor(type.dtype, type.shape, device());
    }
    if (config.has_temperatures()) temperatures = MirroredTensor(DType::kF32, row, device());
  }
  /// Gives layers the factors of the positions in hand.
  void load_temperatures() const {
    if (!config.has_temperatures()) return;
    std::ranges::transform(
        positions.get().span<int32_t>(), temperatures.get().as<float>(),
        [rule = Temperatures(config)](int32_t position) { return rule.at(position); });
    temperatures.upload();
  }

  void allocate(ForwardGoal goal) {
    allocate_inputs();
    const auto make = [&](DType dtype, const Shape& own, std::string_view what) {
      return OwnedTensor(dtype, own, what, device());
    };
    for (OwnedTensor& stream : streams)
      stream = make(shape.dtype, {shape.num_tokens, config.state_width()}, "hidden states");
    loss = make(DType::kF32, {1}, "the loss");
    allocate_result(goal);
    const Shape experts = {std::max<int64_t>(config.moe.router_outputs(), 1)};
    balance_loss = make(DType::kF32, {1}, "the balance loss");
    z_loss = make(DType::kF32, {1}, "the z-loss");
    counts = make(DType::kF32, experts, "counts of the experts");
    score_means = make(DType::kF32, experts, "scores of the experts");
    dropped = make(DType::kI64, {1}, "the dropped assignments");
    transient = Buffer(transient_bytes(), "working memory of the layers", device());
  }

  void allocate_result(ForwardGoal goal) {
    const bool is_loss = goal == ForwardGoal::kLoss;
    const DType dtype = is_loss ? DType::kF32 : shape.dtype;
    const int64_t rows = chosen_rows > 0 ? chosen_rows : shape.num_tokens;
    const Shape result_shape = is_loss ? Shape{rows} : Shape{rows, config.vocab_size};
    result = OwnedTensor(dtype, result_shape, is_loss ? "losses of tokens" : "logits", device());
    if (chosen_rows > 0) {
      // The host reads them after each pass.
      const auto shared = MemoryKind::kShared;
      chosen_tokens = OwnedTensor(DType::kI32, {chosen_rows}, "chosen tokens", device(), shared);
      chosen_log_probabilities =
          OwnedTensor(DType::kF64, {chosen_rows}, "their probabilities", device(), shared);
    }
    if (device().is_host()) return;
    const Shape on_host = chosen_rows > 0 ? Shape{1, config.vocab_size} : result_shape;
    host_result = OwnedTensor(dtype, on_host, "logits on the host");
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

  /// A MoE layer's part of [MoE layers, T, K]; null where that is.
  Tensor of_layer(const Tensor& all, size_t moe_layer) const {
    if (!all) return {};
    const Shape one = {all.shape[1], all.shape[2]};
    const auto offset =
        static_cast<int64_t>(moe_layer) * one.num_elements() * dtype_size(all.dtype);
    return {static_cast<std::byte*>(all.data) + offset, all.dtype, one, all.device};
  }

  void bind(const ParameterSet& parameters, std::vector<ExpertState>& experts) {
    const auto binder = [&](const WeightNames& names = {}) {
      return LayerBinder(parameters, names, {transient.data(), transient.data()});
    };
    PortTensors ports = shared_ports();
    ports.set(Port::kHiddenOut, streams[0]);
    bound_embedding = binder().bind_forward(*embedding, embedding_layout, ports);
    size_t next_experts = 0;
    for (int64_t idx = 0; idx < config.num_layers; ++idx) {
      ports.set(Port::kHidden, streams[idx % 2]);
      ports.set(Port::kHiddenOut, streams[(idx + 1) % 2]);
      if (config.is_moe_layer(idx)) {
        ports.set(Port::kReplayedExperts, of_layer(replayed, next_experts));
        ports.set(Port::kChosenExperts, of_layer(chosen.get(), next_experts));
        ports.set(Port::kExpertBias, bias_of(experts.at(next_experts++)));
      }
      if (cache != nullptr) cache->set_ports(idx, ports);
      const ForwardLayer& layer = layer_of(idx);
      bound_layers.push_back(
          binder({&config, idx}).bind_forward(*layer.program, layer.layout, ports));
    }
    ports.set(Port::kHidden, streams[config.num_layers % 2]);
    bound_head = binder().bind_forward(*head, head_layout, ports);
  }

  /// The memory that all programs have in common.
  PortTensors shared_ports() const {
    PortTensors ports;
    ports.set(Port::kTokens, tokens);
    ports.set(Port::kOwnTokens, tokens);
    ports.set(Port::kLabels, labels);
    ports.set(Port::kPositions, positions);
    ports.set(Port::kCuSeqlens, cu_seqlens);
    ports.set(Port::kChunkBounds, chunk_bounds);
    ports.set(Port::kTemperatures, temperatures);
    ports.set(Port::kStart, start);
    ports.set(Port::kCacheLength, cache_length);
    ports.set(Port::kCacheRows, cache_rows);
    ports.set(Port::kPageTable, page_table);
    ports.set(Port::kCacheSlots, cache_slots);
    ports.set(Port::kBalanceLoss, balance_loss);
    ports.set(Port::kZLoss, z_loss);
    ports.set(Port::kScoreMeans, score_means);
    ports.set(Port::kCounts, counts);
    ports.set(Port::kDropped, dropped);
    ports.set(Port::kLossScale, scale);
    ports.set(Port::kLoss, loss);
    ports.set(Port::kTokenLoss, result);
    ports.set(Port::kLogits, result);
    ports.set(Port::kChosenRows, rows_to_choose);
    ports.set(Port::kTokenRules, rules);
    ports.set(Port::kChosenToken, chosen_tokens);
    ports.set(Port::kChosenLogProbability, chosen_log_probabilities);
    return ports;
  }

  /// Rules where the head finds them: it has logits of the chosen rows, or of all.
  std::vector<TokenRule> place_rules(const SequenceRows& given) {
    places.resize(given.rules.size());
    std::iota(places.begin(), places.end(), 0);
    if (chosen_rows < shape.num_tokens) {
      const auto all = rows_to_choose.get().span<int32_t>();
      std::fill(std::ranges::copy(given.chosen_rows, all.begin()).out, all.end(), 0);
      rows_to_choose.upload();
      return given.rules;
    }
    std::ranges::copy(given.chosen_rows, places.begin());
    std::vector<TokenRule> placed(given.tokens.size(), TokenRule{.given = TokenRule::kNothing});
    for (size_t i = 0; i < places.size(); ++i) placed.at(places[i]) = given.rules[i];
    return placed;
  }
  ChosenTokens take_chosen() const {
    ChosenTokens result;
    for (const int64_t place : places) {
      result.tokens.push_back(chosen_tokens.get().as<int32_t>()[place]);
      result.log_probabilities.push_back(chosen_log_probabilities.get().as<double>()[place]);
    }
    return result;
  }

  void run_programs() {
    pass.run([this] {
      embedding->run(bound_embedding.bindings);
      for (const BoundProgram& layer : bound_layers) layer.program->run(layer.bindings);
      head->run(bound_head.bindings);
    });
  }
  /// The result where the host reads it, after all that was uploaded.
  Tensor run() {
    run_programs();
    fetch_experts();
    return on_host(result);
  }
  /// The experts that were chosen, where they are told.
  void fetch_experts() const {
    if (device().is_host() || !shape.tells_routing) return;
    const Tensor& experts = host_chosen.get();
    device().copy(experts.data, chosen.get().data, experts.num_bytes());
  }
  Tensor on_host(const Tensor& part) const {
    if (device().is_host()) return part;
    const Tensor& host = host_result.get();
    device().copy(host.data, part.data, host.num_bytes());
    return host;
  }
};

int64_t plan_forward(const ModelConfig& config, const BatchShape& shape, ForwardGoal goal,
                     const Backend& backend, const std::optional<CacheShape>& cache) {
  return ForwardPrograms(config, shape, goal, backend, cache).transient_bytes();
}

std::vector<CompileReport> report_forward(const ModelConfig& config, const BatchShape& shape,
                                          ForwardGoal goal, const Backend& backend,
                                          const std::optional<CacheShape>& cache) {
  std::vector<CompileReport> reports;
  const ForwardPrograms programs(config, shape, goal, backend, cache, 0, &reports);
  return reports;
}

ForwardModel::ForwardModel(const ModelConfig& config, const BatchShape& shape, ForwardGoal goal,
                           const Backend& backend, ParameterSet& parameters,
                           std::vector<ExpertState>& experts, KeyValueCache* cache,
                           int64_t chosen_rows)
    : impl_(std::make_unique<Impl>(config, shape, goal, backend, cache, chosen_rows)) {
  ensure((goal == ForwardGoal::kTokens) == (chosen_rows > 0), "a ForwardModel chooses {} rows",
         chosen_rows);
  impl_->allocate(goal);
  impl_->bind(parameters, experts);
}

ForwardModel::ForwardModel(ForwardModel&&) noexcept = default;
ForwardModel::~ForwardModel() = default;

Tensor ForwardModel::run_loss(const MicroBatch& batch) {
  const auto load = [](const Tensor& from, const MirroredTensor& to) {
    ensure(from.dtype == to.get().dtype && from.shape == to.get().shape,
           "ForwardModel: a batch of another shape");
    std::memcpy(to.get().data, from.data, from.num_bytes());
    to.upload();
  };
  ensure(impl_->cache == nullptr, "run_loss with a cache");
  load(batch.tokens, impl_->tokens);
  load(batch.labels, impl_->labels);
  load(batch.positions, impl_->positions);
  load(batch.cu_seqlens, impl_->cu_seqlens);
  if (impl_->config.has_chunks()) {
    fill_chunk_bounds(batch.cu_seqlens.span<int32_t>(), impl_->config.window,
                      impl_->chunk_bounds.get().span<int32_t>());
    impl_->chunk_bounds.upload();
  }
  impl_->load_temperatures();
  if (impl_->shape.replays_routing) {
    const auto replayed = impl_->replayed.get().span<int32_t>();
    std::ranges::fill(replayed, -1);
    if (batch.experts) {
      ensure(batch.experts.num_elements() == std::ssize(replayed),
             "ForwardModel: choices of other tokens");
      std::ranges::copy(batch.experts.span<int32_t>(), replayed.begin());
    }
    impl_->replayed.upload();
  }
  return impl_->run();
}

Tensor ForwardModel::chosen_experts() const {
  ensure(impl_->shape.tells_routing, "chosen_experts: the model does not tell them");
  return impl_->device().is_host() ? impl_->chosen.get() : impl_->host_chosen.get();
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
  impl.load_temperatures();
  const Tensor logits = impl.run();
  impl.cache->set_length(end);
  return logits;
}

ChosenTokens ForwardModel::run_sequences(const SequenceRows& rows) {
  Impl& impl = *impl_;
  const auto num_sequences = std::ssize(rows.lengths);
  ensure(impl.cache != nullptr && impl.cache->shape().is_paged(),
         "run_sequences without a paged cache");
  ensure(
      std::ssize(rows.tokens) <= impl.shape.num_tokens && num_sequences <= impl.shape.max_sequences,
      "run_sequences: {} tokens of {} sequences for a model of {} and {}", rows.tokens.size(),
      num_sequences, impl.shape.num_tokens, impl.shape.max_sequences);
  ensure(rows.rules.size() == rows.chosen_rows.size() && std::ssize(rows.rules) <= impl.chosen_rows,
         "run_sequences: {} rules for {} rows, and a model of {}", rows.rules.size(),
         rows.chosen_rows.size(), impl.chosen_rows);
  // Rows and sequences that are not there are empty, and write nothing.
  const auto give = [](const auto& values, const MirroredTensor& to, const auto& rest) {
    const std::span all(static_cast<std::remove_cvref_t<decltype(rest)>*>(to.get().data),
                        to.get().num_bytes() / sizeof(rest));
    ensure(values.size() <= all.size(), "run_sequences: {} values for {}", values.size(),
           all.size());
    std::fill(std::ranges::copy(values, all.begin()).out, all.end(), rest);
    to.upload();
  };
  give(rows.tokens, impl.tokens, int32_t{0});
  give(rows.positions, impl.positions, int32_t{0});
  give(rows.cache_rows, impl.cache_rows, int32_t{-1});
  give(rows.cu_seqlens, impl.cu_seqlens, rows.cu_seqlens.back());
  give(rows.lengths, impl.cache_length, int32_t{0});
  give(rows.page_table, impl.page_table, int32_t{0});
  give(rows.slots, impl.cache_slots, int32_t{0});
  impl.load_temperatures();
  give(impl.place_rules(rows), impl.rules, TokenRule{.given = TokenRule::kNothing});
  impl.run_programs();
  impl.device().synchronize();
  impl.fetch_experts();
  return impl.take_chosen();
}

Tensor ForwardModel::logits_of(int64_t chosen_row) {
  const Tensor& all = impl_->result.get();
  Tensor row = all;
  row.shape = {1, all.shape[1]};
  row.data = static_cast<std::byte*>(all.data) + impl_->places.at(chosen_row) * row.num_bytes();
  return impl_->on_host(row);
}

}  // namespace tessera
