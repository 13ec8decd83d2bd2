#include "model/weights/parameters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "core/host_tensor.h"
#include "model/layers/layer_program.h"
#include "model/layers/vocabulary_program.h"

namespace tessera {
namespace {

bool ends_with(std::string_view text, std::string_view end) {
  return text.ends_with(end);
}

/// Whether a matrix projects back into the residual stream. Experts in a latent space leave that to
/// the projection out of it.
bool projects_into_residual(const ModelConfig& config, std::string_view name) {
  if (config.moe.latent_size > 0 && ends_with(name, "moe.experts.down.weight")) return false;
  return ends_with(name, "attn.o.weight") || ends_with(name, "delta.o.weight") ||
         ends_with(name, "mamba.o.weight") || ends_with(name, "conv.o.weight") ||
         ends_with(name, "attn.o_up.weight") || ends_with(name, ".down.weight") ||
         ends_with(name, "moe.latent_up.weight");
}

/// B starts at zero, and A with the variance of PEFT's: that of nn.Linear's uniform numbers, which
/// is 1 / (3 · in).
double adapter_deviation(const ModelConfig& config, const ParameterSpec& spec) {
  if (ends_with(spec.name, ".lora_b.weight")) return 0;
  const bool reads_narrow = ends_with(spec.name, "moe.experts.down.lora_a.weight");
  const int64_t in = reads_narrow ? std::ranges::max(config.moe.expert_sizes())
                                  : spec.placement.slice.global.last();
  return 1 / std::sqrt(3.0 * static_cast<double>(in));
}

/// Projections back into the residual stream start smaller, by 1/sqrt(2 · layers), so that its
/// variance does not grow with depth (Radford et al., GPT-2, section 2.3).
ParameterSpec make_spec(const ModelConfig& config, std::string name, const ValueType& type,
                        const WeightPlacement& placement) {
  ParameterSpec spec{
      .name = std::move(name), .dtype = type.dtype, .shape = type.shape, .placement = placement};
  if (type.shape.rank() < 2) {
    const bool of_decays = ends_with(spec.name, "delta.decay_bias");
    const bool is_one =
        ends_with(spec.name, "norm.weight") || ends_with(spec.name, "layer_scalar") ||
        ends_with(spec.name, "_streams.scale") || ends_with(spec.name, "moe.expert_scale") ||
        (of_decays && !config.delta.is_kimi()) || ends_with(spec.name, "mamba.skip");
    spec.init_constant = is_one ? 1.0F : 0.0F;
    spec.init_decays = ends_with(spec.name, ".log_decay");
    spec.init_steps =
        ends_with(spec.name, "mamba.step_bias") || (of_decays && config.delta.is_kimi());
    return spec;
  }
  if (ends_with(spec.name, kHashTable)) {
    spec.init_experts = config.moe.num_experts;
    return spec;
  }
  if (is_adapter_parameter(spec.name)) {
    spec.init_deviation = adapter_deviation(config, spec);
    return spec;
  }
  // Compressed tokens begin as what their gates alone say (DeepSeek-V4).
  if (ends_with(spec.name, ".position_bias")) {
    spec.init_constant = 0.0F;
    return spec;
  }
  spec.init_deviation = config.init_deviation;
  if (projects_into_residual(config, spec.name))
    spec.init_deviation /= std::sqrt(2.0 * static_cast<double>(config.num_layers));
  return spec;
}

/// The names of a program's weights that are stored in FP8.
std::set<std::string> stored_in_fp8(const Program& forward, std::optional<int64_t> layer,
                                    const ProductPrecision& products) {
  if (!layer || !products.fp8_weights) return {};
  const auto rounding = products.rounding(names_of_layer(products.plain, *layer));
  const std::vector<std::string> names = list_fp8_weights(forward, rounding.value());
  return {names.begin(), names.end()};
}

template <typename Built>
void append_weights(const ModelConfig& config, const Built& built, std::optional<int64_t> layer,
                    const ProductPrecision& products, std::set<std::string>& known,
                    std::vector<ParameterSpec>& specs) {
  const std::set<std::string> fp8 = stored_in_fp8(built.forward, layer, products);
  for (const Value& value : built.forward.values()) {
    if (value.kind != ValueKind::kWeight) continue;
    const std::string name = layer ? layer_parameter_name(config, *layer, value.name) : value.name;
    if (!known.insert(name).second) continue;
    specs.push_back(make_spec(config, name, value.type, built.placements.at(value.name)));
    if (value.name != kPreviousNorm) specs.back().layer = layer;
    if (!fp8.contains(value.name)) continue;
    specs.back().dtype = fp8_weight_format().element;
    specs.back().scale = fp8_weight_format().scale;
  }
}

/// What the same ranks hold lies together, so that it travels without being packed.
std::pair<bool, int64_t> holders(const ParameterSpec& spec) {
  return {spec.placement.expert, spec.placement.tp_copies};
}

/// The type of a parameter's gradient.
DType gradient_dtype(const ParameterSpec& spec, GradientPlaces places) {
  return places == GradientPlaces::kRounded && spec.layer ? DType::kBF16 : DType::kF32;
}

/// F32 sums of layers' gradients, which begin at the same place, `begin`. Returns the bytes with
/// these.
int64_t place_sums(const std::vector<ParameterSpec>& specs, int64_t begin,
                   std::vector<int64_t>& sum_of) {
  std::map<int64_t, int64_t> of_layer;
  int64_t end = begin;
  for (size_t idx = 0; idx < specs.size(); ++idx) {
    if (!specs[idx].layer || specs[idx].placement.frozen) continue;
    int64_t& at = of_layer.try_emplace(*specs[idx].layer, begin).first->second;
    sum_of[idx] = at;
    at += align_up(specs[idx].shape.num_elements() * dtype_size(DType::kF32));
    end = std::max(end, at);
  }
  return end;
}

bool takes_turns(GradientPlaces places) {
  return places == GradientPlaces::kLayersInTurn || places == GradientPlaces::kTwoInTurn;
}

/// Gradients of parameters that the same ranks hold: those of the ends one behind the other, then
/// the layers', which begin at `num_places` places by turns. Returns the bytes with these.
int64_t place_in_turn(const std::vector<ParameterSpec>& specs, std::span<const size_t> parameters,
                      int64_t begin, int64_t num_places, std::vector<int64_t>& gradient_of) {
  std::map<int64_t, int64_t> layer_bytes;
  for (const size_t idx : parameters) {
    int64_t& at = specs[idx].layer ? layer_bytes[*specs[idx].layer] : begin;
    gradient_of[idx] = at;
    at += align_up(specs[idx].shape.num_elements() * dtype_size(DType::kF32));
  }
  int64_t most = 0;
  std::map<int64_t, int64_t> place_of;
  for (const auto& [layer, bytes] : layer_bytes) {
    place_of.emplace(layer, std::ssize(place_of) % num_places);
    most = std::max(most, bytes);
  }
  for (const size_t idx : parameters) {
    if (specs[idx].layer) gradient_of[idx] += begin + place_of[*specs[idx].layer] * most;
  }
  return begin + std::min(std::ssize(layer_bytes), num_places) * most;
}

}  // namespace

std::string layer_parameter_name(int64_t layer, std::string_view weight) {
  return fmt::format("layers.{}.{}", layer, weight);
}

std::string layer_parameter_name(const ModelConfig& config, int64_t layer,
                                 std::string_view weight) {
  if (!config.is_mtp_layer(layer)) return layer_parameter_name(layer, weight);
  if (weight == kPreviousNorm) return head_norm_name(layer - config.num_layers);
  return fmt::format("mtp.{}.{}", layer - config.num_layers, weight);
}

std::string_view layer_weight_name(const ModelConfig& config, const ParameterSpec& spec) {
  return std::string_view(spec.name).substr(layer_parameter_name(config, *spec.layer, "").size());
}

std::string mtp_layer_of(const std::string& name) {
  for (const std::string_view begin : {"mtp.", "mtp_heads."}) {
    if (!name.starts_with(begin)) continue;
    return name.substr(begin.size(), name.find('.', begin.size()) - begin.size());
  }
  return "";
}

bool is_mtp_parameter(const std::string& name) {
  return !mtp_layer_of(name).empty();
}

bool is_adapter_parameter(std::string_view name) {
  return ends_with(name, ".lora_a.weight") || ends_with(name, ".lora_b.weight");
}

PipelineChunk whole_model(const ModelConfig& config) {
  return {.embedding = true,
          .first_layer = 0,
          .num_layers = config.num_layers,
          .num_mtp = config.mtp_layers,
          .loss = true};
}

std::optional<std::string> find_cut_block(const Slice& part) {
  const ScaleLayout block = fp8_weight_format().scale;
  const auto is_cut = [](const IndexRange& range, int64_t unit) {
    return range.begin % unit != 0 || range.count % unit != 0;
  };
  for (const IndexRange& rows : part.rows) {
    if (is_cut(rows, block.rows)) return fmt::format("rows {} to {}", rows.begin, rows.end());
  }
  if (!is_cut(part.columns, block.columns)) return std::nullopt;
  return fmt::format("columns {} to {}", part.columns.begin, part.columns.end());
}

std::vector<ParameterSpec> list_parameters(const ModelConfig& config, DType dtype,
                                           const StageGroups& groups,
                                           const std::vector<PipelineChunk>& chunks,
                                           const ProductPrecision& products) {
  // Weights do not depend on the batch: any size that the ranks can share and capacities allow.
  const int64_t rows = 2 * groups.token_ranks() * (config.moe.num_experts + 1);
  const BatchShape shape{.num_tokens = rows, .sequence_length = rows, .dtype = dtype};
  std::vector<ParameterSpec> specs;
  std::set<std::string> known;
  std::map<LayerKind, ModelProgram> layers;
  const auto layer_of_kind = [&](const LayerKind& kind) -> const ModelProgram& {
    const auto found = layers.find(kind);
    if (found != layers.end()) return found->second;
    return layers.emplace(kind, build_layer(config, kind, shape, groups)).first->second;
  };
  for (const PipelineChunk& chunk : chunks) {
    if (chunk.embedding || chunk.num_mtp > 0)
      append_weights(config, build_embedding(config, shape, groups), std::nullopt, products, known,
                     specs);
    for (int64_t i = 0; i < chunk.all_layers(); ++i) {
      const int64_t layer = chunk.first_layer + i;
      append_weights(config, layer_of_kind(config.layer_kind(layer)), layer, products, known,
                     specs);
    }
    for (int64_t depth = 0; chunk.loss && depth <= config.mtp_layers; ++depth)
      append_weights(config, build_head(config, shape, groups, false, depth), std::nullopt,
                     products, known, specs);
  }
  std::stable_partition(specs.begin(), specs.end(),
                        [](const ParameterSpec& spec) { return !spec.placement.frozen; });
  return specs;
}

std::vector<ParameterSpec> list_parameters(const ModelConfig& config, DType dtype,
                                           const ProductPrecision& products) {
  return list_parameters(config, dtype, single_rank_groups(), {whole_model(config)}, products);
}

ParameterSet::Places ParameterSet::find_places(const std::vector<ParameterSpec>& specs,
                                               GradientPlaces places) {
  std::map<std::pair<bool, int64_t>, std::vector<size_t>> by_holders;
  for (size_t idx = 0; idx < specs.size(); ++idx) by_holders[holders(specs[idx])].push_back(idx);
  Places result{.weight_of = std::vector<int64_t>(specs.size()),
                .gradient_of = std::vector<int64_t>(specs.size()),
                .sum_of = std::vector<int64_t>(specs.size())};
  int64_t weights = 0;
  for (auto& [_, parameters] : by_holders) {
    for (const size_t idx : parameters) {
      const ParameterSpec& spec = specs[idx];
      result.weight_of[idx] = weights;
      weights += align_up(spec.format().num_bytes(spec.shape));
    }
    std::erase_if(parameters, [&](size_t idx) { return specs[idx].placement.frozen; });
    for (const size_t idx : parameters) {
      if (takes_turns(places)) continue;
      const ParameterSpec& spec = specs[idx];
      result.gradient_of[idx] = result.gradients;
      result.gradients +=
          align_up(spec.shape.num_elements() * dtype_size(gradient_dtype(spec, places)));
    }
    if (takes_turns(places))
      result.gradients =
          place_in_turn(specs, parameters, result.gradients,
                        places == GradientPlaces::kTwoInTurn ? 2 : 1, result.gradient_of);
  }
  if (places == GradientPlaces::kRounded)
    result.gradients = place_sums(specs, result.gradients, result.sum_of);
  return result;
}

ParameterSet::Bytes ParameterSet::count_bytes(const std::vector<ParameterSpec>& specs,
                                              bool with_gradients, GradientPlaces places) {
  Bytes bytes;
  for (const ParameterSpec& spec : specs)
    bytes.weights += align_up(spec.format().num_bytes(spec.shape));
  if (with_gradients) bytes.gradients = find_places(specs, places).gradients;
  return bytes;
}

ParameterSet::ParameterSet(std::vector<ParameterSpec> specs, bool with_gradients, Device& device,
                           GradientPlaces places)
    : device_(&device) {
  const Bytes bytes = count_bytes(specs, with_gradients, places);
  weights_ = Buffer(bytes.weights, "weights", device);
  gradients_ = Buffer(bytes.gradients, "gradients", device);
  const Places at = find_places(specs, places);
  list(std::move(specs), places);
  place(weights_.data(), with_gradients ? gradients_.data() : nullptr, at);
}

ParameterSet ParameterSet::planned(std::vector<ParameterSpec> specs, GradientPlaces places) {
  ParameterSet set;
  const auto gradients = align_up(count_bytes(specs, false).weights + kAlignment);
  const Places at = find_places(specs, places);
  set.list(std::move(specs), places);
  // Any addresses but null. NOLINTBEGIN(performance-no-int-to-ptr)
  set.place(reinterpret_cast<std::byte*>(kAlignment),
            reinterpret_cast<std::byte*>(kAlignment + gradients), at);
  // NOLINTEND(performance-no-int-to-ptr)
  return set;
}

ParameterSet ParameterSet::without_memory(std::vector<ParameterSpec> specs, GradientPlaces places) {
  ParameterSet set;
  set.list(std::move(specs), places);
  return set;
}

void ParameterSet::list(std::vector<ParameterSpec> specs, GradientPlaces places) {
  for (ParameterSpec& spec : specs) {
    const Tensor weight = {nullptr, spec.dtype, spec.shape, nullptr, spec.scale};
    Tensor grad = {nullptr, gradient_dtype(spec, places), spec.shape};
    Tensor sum = {nullptr, DType::kF32, spec.shape};
    if (spec.placement.frozen) grad.shape = sum.shape = {0};
    is_trained_.push_back(spec.placement.frozen ? 0 : 1);
    by_name_[spec.name] = parameters_.size();
    parameters_.push_back({.spec = std::move(spec), .weight = weight, .grad = grad, .sum = sum});
  }
}

void ParameterSet::place(std::byte* weights, std::byte* gradients, const Places& places) {
  Device* const device = device_ == nullptr || device_->is_host() ? nullptr : device_;
  for (size_t idx = 0; idx < parameters_.size(); ++idx) {
    ModelParameter& parameter = parameters_[idx];
    parameter.weight.data = weights + places.weight_of[idx];
    parameter.weight.device = device;
    if (parameter.is_frozen()) continue;
    parameter.grad.device = parameter.sum.device = device;
    if (gradients == nullptr) continue;
    parameter.grad.data = parameter.sum.data = gradients + places.gradient_of[idx];
    if (parameter.rounds_gradient()) parameter.sum.data = gradients + places.sum_of[idx];
  }
}

size_t ParameterSet::index(std::string_view name) const {
  const auto found = by_name_.find(name);
  ensure(found != by_name_.end(), "the model has no parameter '{}'", name);
  return found->second;
}

void ParameterSet::initialize(uint64_t seed) {
  for (const ModelParameter& parameter : parameters_)
    initialize_weight(parameter.spec, parameter.spec.placement.slice, parameter.weight, seed);
}

void ParameterSet::reset_gradients() {
  if (gradients_.num_bytes() == 0) return;
  is_unset_ = is_trained_;
}

bool ParameterSet::begin_gradient(size_t idx) {
  return !is_unset_.empty() && std::exchange(is_unset_[idx], 0) != 0;
}

bool ParameterSet::begin_sum(size_t idx) {
  return parameters_[idx].rounds_gradient() || begin_gradient(idx);
}

void ParameterSet::settle_gradient(size_t idx) {
  const Tensor& grad = parameters_[idx].grad;
  if (begin_gradient(idx)) device_->zero(grad.data, grad.num_bytes());
}

void ParameterSet::settle_gradients() {
  for (size_t idx = 0; idx < parameters_.size(); ++idx) settle_gradient(idx);
}

void ParameterSet::zero_gradients() {
  is_unset_.clear();
  if (gradients_.num_bytes() == 0) return;
  if (!device_->is_host()) {
    device_->zero(gradients_.data(), gradients_.num_bytes());
    return;
  }
  constexpr int64_t kBlock = 1 << 20;
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < gradients_.num_bytes(); begin += kBlock) {
    std::memset(gradients_.data() + begin, 0, std::min(kBlock, gradients_.num_bytes() - begin));
  }
}

void copy_weights(const ParameterSet& from, const ParameterSet& to) {
  for (const ModelParameter& parameter : to.all()) {
    const HostTensor source(from.find(parameter.spec.name).weight, HostTensor::Access::kRead);
    const HostTensor target(parameter.weight, HostTensor::Access::kWrite);
    host_device().copy(target.get().data, source.get().data, target.get().num_bytes());
    target.store();
  }
}

}  // namespace tessera
