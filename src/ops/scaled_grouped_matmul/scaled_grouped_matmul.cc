#include "ops/scaled_grouped_matmul/scaled_grouped_matmul.h"

#include "ops/grouped_matmul/grouped_tile_model.h"

namespace tessera {
namespace {

using Op = ScaledGroupedMatmul;

bool is_fp8_matrix(const ValueType& type) {
  return type.dtype == DType::kE4M3 && type.shape.rank() == 2;
}

/// Whether the scales of the two matrices belong together.
bool fit(const ScaleLayout& a, const ScaleLayout& weight) {
  if (a == ScaleLayout::row()) return weight == ScaleLayout::row();
  return a == ScaleLayout::block(1, Op::kBlock) &&
         weight == ScaleLayout::block(Op::kBlock, Op::kBlock);
}

}  // namespace

ScaledGroupedMatmul::ScaledGroupedMatmul(const ScaledGroupedMatmulSpec& spec)
    : sizes_(spec.group_sizes, kName), output_(spec.output) {
  require(is_storage(output_), "{}: gives f32 or bf16, not {}", kName, dtype_name(output_));
}

std::string ScaledGroupedMatmul::attributes() const {
  return fmt::format("experts={}", sizes_.to_string());
}

std::vector<ValueType> ScaledGroupedMatmul::infer(std::span<const ValueType> inputs) const {
  const bool has_offsets = inputs.size() == 3;
  check_shape(*this, has_offsets || (inputs.size() == 2 && sizes_.num_experts() == 1),
              "takes a, weight and offsets, which one expert does not need, got {} inputs",
              inputs.size());
  const ValueType& a = inputs[kA];
  const ValueType& weight = inputs[kWeight];
  check_shape(*this, is_fp8_matrix(weight) && weight.shape[0] == sizes_.total() && !weight.ragged(),
              "weight must be e4m3 [{}, K], got {}", sizes_.total(), weight.to_string());
  check_shape(*this, is_fp8_matrix(a) && a.shape[1] == weight.shape[1] && a.ragged_dim <= 0,
              "a must be e4m3 [R, {}], got {}", weight.shape[1], a.to_string());
  check_shape(*this, fit(a.scale, weight.scale),
              "scales must be of rows of both, or of blocks of 1x128 of a and 128x128 of the "
              "weight; got '{}' and '{}'",
              a.scale.to_string(), weight.scale.to_string());
  if (a.scale.kind == ScaleLayout::Kind::kBlock) {
    for (const int64_t size : sizes_.values())
      check_shape(*this, size % kBlock == 0,
                  "experts whose weights have scales of blocks must be multiples of {}, one has "
                  "{} rows",
                  kBlock, size);
  }
  check_shape(*this, has_offsets || !a.ragged(), "ragged rows need offsets, got {}", a.to_string());
  check_shape(*this,
              !has_offsets || (inputs[kOffsets].dtype == DType::kI64 &&
                               inputs[kOffsets].shape == Shape{sizes_.num_experts() + 1}),
              "offsets must be i64 [{}], got {}", sizes_.num_experts() + 1,
              inputs.back().to_string());
  ValueType y = with_last_dim(with_dtype(a, output_), sizes_.largest());
  y.scale = {};
  return {y};
}

Cost ScaledGroupedMatmul::cost(std::span<const ValueType> inputs,
                               std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const ValueType& a = inputs[kA];
  cost.flops = 2.0 * static_cast<double>(a.shape.num_elements()) *
               static_cast<double>(sizes_.total()) / static_cast<double>(sizes_.num_experts());
  return cost;
}

bool runs_on_tensor_cores(const ExpertSizes& sizes, int64_t reduction) {
  return reduction > 0 && reduction % 16 == 0 && sizes.largest() % 8 == 0 &&
         sizes.num_experts() <= cuda::kGroupedMaxExperts;
}

bool takes_e4m3(const Format& format) {
  return is_unscaled(format) || format.element == DType::kE4M3;
}

OperatorPtr make_scaled_grouped_matmul(const ScaledGroupedMatmulSpec& spec) {
  return std::make_shared<ScaledGroupedMatmul>(spec);
}

}  // namespace tessera
