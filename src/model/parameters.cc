#include "model/parameters.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/random.h"
#include "model/layer_program.h"

namespace tessera {
namespace {

bool ends_with(std::string_view text, std::string_view end) {
  return text.ends_with(end);
}

/// Projections back into the residual stream start smaller, by 1/sqrt(2 · layers), so that its
/// variance does not grow with depth (Radford et al., GPT-2, section 2.3).
ParameterSpec make_spec(const ModelConfig& config, std::string name, const ValueType& type) {
  ParameterSpec spec{.name = std::move(name), .dtype = type.dtype, .shape = type.shape};
  if (type.shape.rank() < 2) {
    spec.init_constant = ends_with(spec.name, "norm.weight") ? 1.0F : 0.0F;
    return spec;
  }
  const bool into_residual =
      ends_with(spec.name, "attn.o.weight") || ends_with(spec.name, "down.weight");
  spec.init_deviation = config.init_deviation;
  if (into_residual) spec.init_deviation /= std::sqrt(2.0 * static_cast<double>(config.num_layers));
  return spec;
}

void append_weights(const ModelConfig& config, const Program& program, const std::string& prefix,
                    std::vector<ParameterSpec>& specs) {
  for (const Value& value : program.values()) {
    const std::string name = prefix + value.name;
    const bool known =
        std::ranges::any_of(specs, [&](const ParameterSpec& spec) { return spec.name == name; });
    if (value.kind == ValueKind::kWeight && !known)
      specs.push_back(make_spec(config, name, value.type));
  }
}

void fill_constant(const Tensor& weight, float value) {
  if (weight.dtype == DType::kF32) {
    std::ranges::fill(weight.span<float>(), value);
  } else {
    std::ranges::fill(weight.span<Bf16>(), Bf16(value));
  }
}

/// Numbers are drawn in blocks, each from its own stream, so that the result does not depend on the
/// thread count.
void fill_random(const Tensor& weight, uint64_t seed, uint64_t stream, double deviation) {
  constexpr int64_t kBlock = 4096;
  const int64_t count = weight.num_elements();
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    std::array<float, kBlock> block{};
    const auto size = static_cast<size_t>(std::min(kBlock, count - begin));
    fill_normal(std::span(block).first(size), seed,
                mix(stream, static_cast<uint64_t>(begin / kBlock)), static_cast<float>(deviation));
    if (weight.dtype == DType::kF32) {
      std::copy_n(block.begin(), size, static_cast<float*>(weight.data) + begin);
    } else {
      std::transform(block.begin(), block.begin() + size, static_cast<Bf16*>(weight.data) + begin,
                     [](float x) { return Bf16(x); });
    }
  }
}

}  // namespace

std::string layer_parameter_name(int64_t layer, std::string_view weight) {
  return fmt::format("layers.{}.{}", layer, weight);
}

std::vector<ParameterSpec> list_parameters(const ModelConfig& config, DType dtype) {
  const BatchShape shape{.num_tokens = config.moe.num_experts + 1, .dtype = dtype};
  std::vector<ParameterSpec> specs;
  append_weights(config, build_embedding(config, shape).forward, "", specs);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    append_weights(config, build_layer(config, config.layer_kind(layer), shape).forward,
                   layer_parameter_name(layer, ""), specs);
  }
  append_weights(config, build_head(config, shape, false).forward, "", specs);
  return specs;
}

ParameterSet::Bytes ParameterSet::count_bytes(const std::vector<ParameterSpec>& specs,
                                              bool with_gradients) {
  Bytes bytes;
  for (const ParameterSpec& spec : specs) {
    bytes.weights += align_up(spec.shape.num_elements() * dtype_size(spec.dtype));
    if (with_gradients)
      bytes.gradients += align_up(spec.shape.num_elements() * dtype_size(DType::kF32));
  }
  return bytes;
}

ParameterSet::ParameterSet(std::vector<ParameterSpec> specs, bool with_gradients) {
  const Bytes bytes = count_bytes(specs, with_gradients);
  weights_ = Buffer(bytes.weights, "weights");
  gradients_ = Buffer(bytes.gradients, "gradients");
  Bytes at;
  for (ParameterSpec& spec : specs) {
    ModelParameter parameter{.spec = std::move(spec), .weight = {}, .grad = {}};
    const Shape& shape = parameter.spec.shape;
    parameter.weight = weights_.tensor(at.weights, parameter.spec.dtype, shape);
    at.weights += align_up(parameter.weight.num_bytes());
    if (with_gradients) {
      parameter.grad = gradients_.tensor(at.gradients, DType::kF32, shape);
      at.gradients += align_up(parameter.grad.num_bytes());
    }
    by_name_[parameter.spec.name] = parameters_.size();
    parameters_.push_back(std::move(parameter));
  }
}

const ModelParameter& ParameterSet::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  ensure(found != by_name_.end(), "the model has no parameter '{}'", name);
  return parameters_[found->second];
}

void ParameterSet::initialize(uint64_t seed) {
  for (const ModelParameter& parameter : parameters_) {
    const ParameterSpec& spec = parameter.spec;
    if (spec.init_deviation == 0) {
      fill_constant(parameter.weight, spec.init_constant);
    } else {
      fill_random(parameter.weight, seed, hash_text(spec.name.data(), spec.name.size()),
                  spec.init_deviation);
    }
  }
}

void ParameterSet::zero_gradients() {
  constexpr int64_t kBlock = 1 << 20;
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < gradients_.num_bytes(); begin += kBlock) {
    std::memset(gradients_.data() + begin, 0,
                static_cast<size_t>(std::min(kBlock, gradients_.num_bytes() - begin)));
  }
}

}  // namespace tessera
