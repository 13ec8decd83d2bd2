#include "program/rounding/rounded_operand.h"

#include "ops/add/add.h"
#include "ops/add_bias/add_bias.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/linear/linear.h"
#include "program/rounding/fp8_products.h"

namespace tessera {

bool is_by_rows(const CastSpec& cast) {
  return is_of_rows(cast) && !cast.rotated && cast.number != NarrowNumber::kE2M1;
}

QuantizeSpec quantize_spec(const CastSpec& cast) {
  ensure(is_by_rows(cast), "{} is no rounding by rows", cast.to_string());
  return {.element = cast.number == NarrowNumber::kE5M2 ? DType::kE5M2 : DType::kE4M3,
          .scale = cast.length == 0 ? ScaleLayout::row()
                                    : ScaleLayout::block(1, static_cast<int32_t>(cast.length))};
}

std::optional<WeightProduct> find_product(const Operator& op) {
  if (const auto* linear = dynamic_cast<const Linear*>(&op)) {
    const bool has_bias = linear->extra() == Linear::Extra::kBias;
    return WeightProduct{Linear::kX, Linear::kWeight, Linear::kAddend,
                         has_bias ? make_add_bias() : make_add()};
  }
  if (dynamic_cast<const LinearDgrad*>(&op) != nullptr)
    return WeightProduct{LinearDgrad::kGrad, LinearDgrad::kWeight, LinearDgrad::kAddend,
                         make_add()};
  if (dynamic_cast<const GroupedMatmul*>(&op) != nullptr)
    return WeightProduct{.rows = GroupedMatmul::kA, .weight = GroupedMatmul::kWeight};
  return std::nullopt;
}

std::optional<WeightGradient> find_gradient(const Program& program, const Node& node) {
  if (dynamic_cast<const LinearWgrad*>(node.op.get()) != nullptr) {
    const int64_t rows = program.type(node.outputs[LinearWgrad::kGradWeight]).shape[0];
    return WeightGradient{LinearWgrad::kGrad, LinearWgrad::kX, ExpertSizes({rows}, "a weight")};
  }
  if (const auto* grouped = dynamic_cast<const GroupedMatmulWgrad*>(node.op.get()))
    return WeightGradient{GroupedMatmulWgrad::kNarrow, GroupedMatmulWgrad::kWide, grouped->sizes(),
                          node.inputs[GroupedMatmulWgrad::kOffsets]};
  return std::nullopt;
}

}  // namespace tessera
