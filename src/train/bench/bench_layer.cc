#include "train/bench/bench_layer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <span>
#include <utility>

#include "core/host_tensor.h"
#include "core/random.h"
#include "model/batch/position_inputs.h"
#include "model/build/layer_builder.h"
#include "model/weights/parameters.h"
#include "runtime/derived_program.h"
#include "train/setup/device_choice.h"
#include "train/setup/machine.h"
#include "train/setup/matrix_peak.h"
#include "train/setup/run_layout.h"
#include "train/setup/size_check.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

const char* block_name(LayerBlock block) {
  switch (block) {
    case LayerBlock::kAttention:
      return "attention";
    case LayerBlock::kMlp:
      return "mlp";
    case LayerBlock::kMoe:
      break;
  }
  return "moe";
}

/// The weights of one layer that a program uses.
std::vector<ParameterSpec> list_weights(const ModelConfig& config, DType dtype,
                                        const WeightNames& names, const Program& program) {
  std::vector<ParameterSpec> specs = list_parameters(config, dtype);
  std::erase_if(specs, [&](const ParameterSpec& spec) {
    return std::ranges::none_of(program.values(), [&](const Value& value) {
      return value.kind == ValueKind::kWeight && names.of(value.name) == spec.name;
    });
  });
  return specs;
}

void fill_with_noise(const Tensor& tensor, uint64_t seed) {
  constexpr int64_t kBlock = 4096;
  const HostTensor host(tensor, HostTensor::Access::kWrite);
  const int64_t size = tensor.num_elements();
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    std::array<float, kBlock> values{};
    const auto block = std::span(values).first(std::min(kBlock, size - begin));
    fill_normal(block, seed, static_cast<uint64_t>(begin), 1.0F);
    if (tensor.dtype == DType::kBF16) {
      std::ranges::transform(block, host.get().as<Bf16>() + begin, [](float x) { return Bf16(x); });
    } else {
      std::ranges::copy(block, host.get().as<float>() + begin);
    }
  }
  host.store();
}

template <typename T>
void fill(const Tensor& tensor, const std::vector<T>& values) {
  const HostTensor host(tensor, HostTensor::Access::kWrite);
  std::ranges::copy(values, host.get().as<T>());
  host.store();
}

void fill(const Tensor& scalar, float value) {
  const HostTensor host(scalar, HostTensor::Access::kWrite);
  host.get().as<float>()[0] = value;
  host.store();
}

ValueId backward_of(const std::vector<Link>& links, ValueId forward) {
  const auto found = std::ranges::find(links, forward, &Link::forward);
  ensure(found != links.end(), "a block's value has no gradient");
  return found->backward;
}

/// Each pass over a block quantizes its weights, which nothing updates.
BatchShape shape_of_block(const Settings& settings) {
  BatchShape shape = batch_shape(settings);
  shape.products.keeps_copies = false;
  shape.products.fp8_weights = false;
  return shape;
}

/// A block's two programs with memory for all that they read and write.
class BoundBlock {
 public:
  BoundBlock(const Settings& settings, LayerBlock block, const Backend& backend)
      : settings_(settings),
        shape_(shape_of_block(settings)),
        layer_(find_layer(settings.model, block)),
        layout_(build_block(settings.model, block, settings.model.layer_kind(layer_), shape_,
                            single_rank_groups())),
        program_(derive(
            std::exchange(layout_.forward, Program()),
            {.gradients = request(),
             .recompute = names_of_layer(parse_recompute(settings.train.recompute), layer_),
             .gathers = settings.model.moe.fuse_gather,
             .fuse_activations = settings.model.moe.fuse_activation,
             .rounding = shape_.products.rounding(names_of_layer(shape_.products.plain, layer_))},
            backend)),
        names_{&settings.model, layer_},
        weights_(list_weights(settings.model, shape_.dtype, names_, program_.forward.program()),
                 /*with_gradients=*/true, backend.device()),
        saved_(program_.forward.plan().saved_bytes, "saved activations", backend.device()),
        transient_(std::max(program_.forward.plan().transient_bytes,
                            program_.backward.plan().transient_bytes),
                   "working memory of the block", backend.device()) {
    weights_.initialize(static_cast<uint64_t>(settings.run.seed));
    bind_forward();
    bind_backward_pass();
  }

  const DerivedProgram& program() const { return program_; }
  int64_t saved_bytes() const { return saved_.num_bytes(); }
  int64_t transient_bytes() const { return transient_.num_bytes(); }
  void run_forward(const NodeObserver& observer) { program_.forward.run(forward_, observer); }
  /// As a step's first micro-batch: gradients of weights are written, not added to others.
  void run_backward(const NodeObserver& observer) { program_.backward.run(backward_, observer); }
  std::vector<double> expert_load() const {
    if (!layout_.has(Port::kCounts)) return {};
    const HostTensor counts(at(forward_, layout_.at(Port::kCounts)), HostTensor::Access::kRead);
    const auto values = counts.get().span<float>();
    return {values.begin(), values.end()};
  }

 private:
  bool has_experts() const { return layout_.has(Port::kZLoss); }
  DifferentiateRequest request() const {
    DifferentiateRequest request{{layout_.at(Port::kHiddenOut)}, {layout_.at(Port::kHidden)}};
    if (has_experts()) request.outputs.push_back(layout_.at(Port::kZLoss));
    if (is_balanced()) request.outputs.push_back(balance());
    return request;
  }
  bool is_balanced() const { return layout_.has(Port::kBalanceLoss); }
  /// Through which value the balance loss gives its gradient.
  ValueId balance() const {
    return settings_.model.moe.balance_scope == BalanceTokens::kModel
               ? layout_.at(Port::kScoreMeans)
               : layout_.at(Port::kBalanceLoss);
  }

  static Tensor& at(Bindings& bindings, ValueId id) { return bindings.tensors[id]; }
  static const Tensor& at(const Bindings& bindings, ValueId id) { return bindings.tensors[id]; }

  /// Memory of zeros for every bound value that has none.
  void bind_rest(const Executable& program, Bindings& bindings) {
    bindings.saved = saved_.data();
    bindings.transient = transient_.data();
    for (ValueId id = 0; id < program.program().num_values(); ++id) {
      const bool bound = program.plan().values[id].storage == Storage::kBound;
      if (!bound || at(bindings, id)) continue;
      const ValueType& type = program.program().type(id);
      memory_.emplace_back(type.dtype, type.shape, "inputs and outputs of the block",
                           program.backend().device());
      at(bindings, id) = memory_.back();
    }
  }

  void bind_forward() {
    forward_ = program_.forward.make_bindings();
    const Program& program = program_.forward.program();
    bind_parameters(find_parameters(program, program, {}, weights_, names_), weights_, forward_);
    bind_rest(program_.forward, forward_);
    fill_with_noise(at(forward_, layout_.at(Port::kHidden)), 1);
    if (layout_.has(Port::kPositions))
      fill(at(forward_, layout_.at(Port::kPositions)), positions());
    if (layout_.has(Port::kCuSeqlens))
      fill(at(forward_, layout_.at(Port::kCuSeqlens)), sequence_bounds());
    if (layout_.has(Port::kOwnTokens))
      fill(at(forward_, layout_.at(Port::kOwnTokens)), token_ids());
    bind_places();
  }

  /// What else follows from the tokens' places in their sequences.
  void bind_places() {
    if (layout_.has(Port::kChunkBounds)) {
      const Tensor& to = at(forward_, layout_.at(Port::kChunkBounds));
      std::vector<int32_t> bounds(to.num_elements());
      fill_chunk_bounds(sequence_bounds(), settings_.model.window, bounds);
      fill(to, bounds);
    }
    if (layout_.has(Port::kTemperatures)) {
      std::vector<float> factors;
      const Temperatures rule(settings_.model);
      for (const int32_t position : positions()) factors.push_back(rule.at(position));
      fill(at(forward_, layout_.at(Port::kTemperatures)), factors);
    }
  }

  void bind_backward_pass() {
    backward_ = bind_backward(program_, forward_);
    bind_parameters(find_parameters(program_.backward.program(), program_.forward.program(),
                                    program_.derived.accumulators, weights_, names_),
                    weights_, backward_);
    bind_rest(program_.backward, backward_);
    const IdVector<ValueId, Value>& values = program_.backward.program().values();
    for (size_t id = 0; id < values.size(); ++id) {
      if (values[id].kind == ValueKind::kAccumulator)
        backward_.unset.push_back(static_cast<ValueId>(id));
    }
    const std::vector<Link>& grads = program_.derived.grad_outputs;
    fill_with_noise(at(backward_, backward_of(grads, layout_.at(Port::kHiddenOut))), 2);
    if (!has_experts()) return;
    const MoeConfig& moe = settings_.model.moe;
    fill(at(backward_, backward_of(grads, layout_.at(Port::kZLoss))),
         static_cast<float>(moe.z_loss_coefficient));
    if (is_balanced() && balance() == layout_.at(Port::kBalanceLoss))
      fill(at(backward_, backward_of(grads, layout_.at(Port::kBalanceLoss))),
           static_cast<float>(moe.balance_coefficient));
  }

  std::vector<int32_t> positions() const {
    std::vector<int32_t> positions(shape_.num_tokens);
    for (int64_t i = 0; i < shape_.num_tokens; ++i)
      positions[i] = static_cast<int32_t>(i % shape_.sequence_length);
    return positions;
  }
  /// Ids one after the other, which a table of experts gives even loads.
  std::vector<int32_t> token_ids() const {
    std::vector<int32_t> ids(shape_.num_tokens);
    for (int64_t i = 0; i < shape_.num_tokens; ++i)
      ids[i] = static_cast<int32_t>(i % settings_.model.vocab_size);
    return ids;
  }
  std::vector<int32_t> sequence_bounds() const {
    std::vector<int32_t> bounds;
    for (int64_t i = 0; i <= shape_.max_sequences; ++i)
      bounds.push_back(static_cast<int32_t>(i * shape_.sequence_length));
    return bounds;
  }

  const Settings& settings_;
  BatchShape shape_;
  int64_t layer_;
  ModelProgram layout_;  // its forward program lives in `program_`
  DerivedProgram program_;
  WeightNames names_;
  ParameterSet weights_;
  Buffer saved_, transient_;
  std::vector<OwnedTensor> memory_;
  Bindings forward_, backward_;
};

/// Puts zeros in the place of whatever a GPU's cache holds.
class CacheFlush {
 public:
  explicit CacheFlush(Device& device)
      : device_(device),
        zeros_(device.is_host() ? 0 : kBytes, "zeros that clear the cache", device) {}
  void run() { device_.zero(zeros_.data(), zeros_.num_bytes()); }

 private:
  static constexpr int64_t kBytes = int64_t{256} << 20;  // several times any GPU's L2
  Device& device_;
  Buffer zeros_;
};

double time_pass(Device& device, CacheFlush& flush, const std::function<void()>& run) {
  flush.run();
  device.synchronize();
  const auto start = Clock::now();
  run();
  device.synchronize();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

NodeObserver add_to(std::map<std::string, double>& operators) {
  return [&operators](const NodeEvent& event) {
    operators[std::string(event.node.op->name())] += event.seconds();
  };
}

}  // namespace

int64_t find_layer(const ModelConfig& config, LayerBlock block) {
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const bool moe = config.is_moe_layer(layer);
    const bool has_block = block == LayerBlock::kAttention
                               ? config.has_mixer(layer)
                               : config.has_mlp(layer) && moe == (block == LayerBlock::kMoe);
    if (has_block) return layer;
  }
  user_error("none of the model's {} layers has a block '{}'; {} of them have experts",
             config.num_layers, block_name(block), config.num_moe_layers());
}

LayerBenchResult bench_layer(const LayerBenchRequest& request) {
  check_bench_runs(request.runs, request.warmup);
  check_device(request.settings, 1);
  validate(request.settings.model);
  check_batch(request.settings.model, request.settings.train.micro_batch,
              request.settings.data.sequence_length);
  const BatchShape shape = batch_shape(request.settings);
  check_shares(request.settings.model, shape, single_rank_groups());
  const Backend backend = choose_backend(request.settings);
  Device& device = backend.device();
  LayerBenchResult result{.device = backend.is_host() ? describe_machine() : device.name(),
                          .tokens = shape.num_tokens};
  MatrixPeak peak = make_matrix_peak(measure_matrix_peak(backend, shape.dtype),
                                     make_peak_meter(backend, shape.dtype));
  BoundBlock block(request.settings, request.block, backend);
  CacheFlush flush(device);
  result.saved_bytes = block.saved_bytes();
  result.transient_bytes = block.transient_bytes();
  result.forward.flops = block.program().forward.program().cost().flops;
  result.backward.flops = block.program().model_flops - result.forward.flops;
  for (int64_t i = 0; i < request.warmup + request.runs; ++i) {
    const double forward = time_pass(device, flush, [&] { block.run_forward({}); });
    const double backward = time_pass(device, flush, [&] { block.run_backward({}); });
    if (i < request.warmup) continue;
    result.forward.seconds.push_back(forward);
    result.backward.seconds.push_back(backward);
  }
  block.run_forward(add_to(result.forward.operators));
  block.run_backward(add_to(result.backward.operators));
  device.synchronize();
  for (LayerBenchResult::Pass* pass : {&result.forward, &result.backward}) {
    std::ranges::sort(pass->seconds);
    peak.share_of(pass->flops / pass->seconds.front());
  }
  result.matrix_peak = peak.value();
  result.expert_load = block.expert_load();
  return result;
}

}  // namespace tessera
