#include "ops/grouped_matmul/grouped_matmul.h"

#include "ops/grouped_matmul/gather_rule.h"
#include "ops/permute/permute.h"
#include "ops/permute/row_maps.h"

namespace tessera {
namespace {

bool is_matrix(const ValueType& type) {
  return is_factor(type.dtype) && type.shape.rank() == 2;
}

void check_offsets(const Operator& op, const ValueType& offsets, int64_t num_experts) {
  check_shape(op, offsets.dtype == DType::kI64 && offsets.shape == Shape{num_experts + 1},
              "offsets must be i64 [{}], got {}", num_experts + 1, offsets.to_string());
}

/// FLOPs of R rows, each against H × the mean group: rows are taken to spread evenly over experts.
double product_flops(int64_t num_rows, int64_t hidden_size, const ExpertSizes& sizes) {
  return 2.0 * static_cast<double>(num_rows) * static_cast<double>(hidden_size) *
         static_cast<double>(sizes.total()) / static_cast<double>(sizes.num_experts());
}

void check_count(const Operator& op, std::span<const ValueType> inputs, std::string_view first,
                 bool gather) {
  check_shape(op, inputs.size() == (gather ? 5U : 3U), "takes {} and offsets{}, got {} inputs",
              first, gather ? ", source_R and row_of_TK" : "", inputs.size());
}

/// The type of the rows that the operator multiplies: `wide`, or what it gathers of that.
template <typename Op>
ValueType wide_rows(const Op& op, std::span<const ValueType> inputs, const ValueType& wide,
                    bool gather) {
  if (!gather) return wide;
  check_source(op, inputs[Op::kSource]);
  check_row_of(op, inputs[Op::kRowOf]);
  check_shape(op, is_matrix(wide), "what is gathered must be f32, bf16 or f16 [T, H], got {}",
              wide.to_string());
  check_same_first_dim(op, wide, inputs[Op::kRowOf], "what is gathered and row_of_TK");
  return rows_like(inputs[Op::kSource], wide.dtype, wide.shape[1]);
}

/// row_of_TK serves the gradient alone.
template <typename Op>
std::span<const ValueType> moved(std::span<const ValueType> inputs) {
  return inputs.first(std::min<int64_t>(std::ssize(inputs), Op::kRowOf));
}

}  // namespace

GroupedMatmul::GroupedMatmul(const GroupedMatmulSpec& spec)
    : sizes_(spec.group_sizes, "grouped_matmul"), side_(spec.side), gather_(spec.gather) {
  require(!gather_ || side_ == GroupedSide::kOut,
          "grouped_matmul: rows are gathered on side out alone, where they have H columns");
}

std::string GroupedMatmul::attributes() const {
  return fmt::format("{} experts={}{}", side_ == GroupedSide::kOut ? "out" : "in",
                     sizes_.to_string(), gather_ ? " gather" : "");
}

std::vector<ValueType> GroupedMatmul::infer(std::span<const ValueType> inputs) const {
  check_count(*this, inputs, "a, weight", gather_);
  const ValueType a = wide_rows(*this, inputs, inputs[kA], gather_);
  const ValueType& weight = inputs[kWeight];
  check_shape(*this, is_matrix(weight) && weight.shape[0] == sizes_.total(),
              "weight must be f32, bf16 or f16 [{}, H], got {}", sizes_.total(),
              weight.to_string());
  const int64_t hidden_size = weight.shape[1];
  const bool out = side_ == GroupedSide::kOut;
  const int64_t width = out ? hidden_size : sizes_.largest();
  check_shape(*this, is_matrix(a) && a.dtype == weight.dtype && a.shape[1] == width,
              "a must be {} [R, {}], got {}", dtype_name(weight.dtype), width, a.to_string());
  check_offsets(*this, inputs[kOffsets], sizes_.num_experts());
  return {
      with_dtype(with_last_dim(a, out ? sizes_.largest() : hidden_size), product_dtype(a.dtype))};
}

Cost GroupedMatmul::cost(std::span<const ValueType> inputs,
                         std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(moved<GroupedMatmul>(inputs), outputs);
  cost.flops = product_flops(outputs[kY].shape[0], inputs[kWeight].shape[1], sizes_);
  return cost;
}

void GroupedMatmul::differentiate(GradientBuilder& builder) const {
  const bool out = side_ == GroupedSide::kOut;
  const ValueId grad = *builder.grad_output(kY);
  const ValueId offsets = builder.input(kOffsets);
  if (builder.needs_grad(kA)) {
    const GroupedMatmulSpec other{sizes_.values(), out ? GroupedSide::kIn : GroupedSide::kOut};
    ValueId grad_a = builder.emit(make_grouped_matmul(other),
                                  {grad, builder.input(kWeight), offsets})[GroupedMatmul::kY];
    if (gather_) {
      grad_a = builder.emit(make_unpermute(),
                            {grad_a, builder.input(kRowOf), builder.input(kSource)})[Unpermute::kY];
    }
    builder.set_grad_input(kA, grad_a);
  }
  if (builder.needs_grad(kWeight)) {
    ValueId a = builder.input(kA);
    if (gather_)
      a = builder.emit(make_permute(),
                       {a, builder.input(kSource), builder.input(kRowOf)})[Permute::kRows];
    builder.emit(std::make_shared<GroupedMatmulWgrad>(sizes_),
                 {out ? grad : a, out ? a : grad, offsets}, {kWeight});
  }
}

OperatorPtr GroupedMatmul::with_gather(int input) const {
  if (gather_ || input != kA || side_ != GroupedSide::kOut) return nullptr;
  return make_grouped_matmul({.group_sizes = sizes_.values(), .side = side_, .gather = true});
}

double GroupedMatmul::gather_cost(std::span<const ValueType> inputs) const {
  return gathered_rows_cost(cost(inputs, infer(inputs)).flops);
}

double GroupedMatmul::gradient_gather_cost(std::span<const ValueType> inputs) const {
  return gathered_wgrad_cost(cost(inputs, infer(inputs)).flops);
}

std::string GroupedMatmulWgrad::attributes() const {
  return fmt::format("experts={}{}", sizes_.to_string(), gather_ ? " gather" : "");
}

std::vector<ValueType> GroupedMatmulWgrad::infer(std::span<const ValueType> inputs) const {
  check_count(*this, inputs, "narrow, wide", gather_);
  const ValueType& narrow = inputs[kNarrow];
  const ValueType wide = wide_rows(*this, inputs, inputs[kWide], gather_);
  check_shape(*this, is_matrix(narrow) && narrow.shape[1] == sizes_.largest(),
              "narrow must be f32, bf16 or f16 [R, {}], got {}", sizes_.largest(),
              narrow.to_string());
  check_shape(*this,
              is_matrix(wide) && wide.dtype == narrow.dtype && wide.shape[0] == narrow.shape[0],
              "wide must be {} [{}, H], got {}", dtype_name(narrow.dtype), narrow.shape[0],
              wide.to_string());
  check_offsets(*this, inputs[kOffsets], sizes_.num_experts());
  return {{.dtype = DType::kF32, .shape = {sizes_.total(), wide.shape[1]}}};
}

Cost GroupedMatmulWgrad::cost(std::span<const ValueType> inputs,
                              std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(moved<GroupedMatmulWgrad>(inputs), outputs);
  cost.flops = product_flops(inputs[kNarrow].shape[0], inputs[kWide].shape[1], sizes_);
  return cost;
}

OperatorPtr GroupedMatmulWgrad::with_gather(int input) const {
  if (gather_ || input != kWide) return nullptr;
  return std::make_shared<GroupedMatmulWgrad>(sizes_, true, of_value_);
}

OperatorPtr GroupedMatmulWgrad::with_value() const {
  return std::make_shared<GroupedMatmulWgrad>(sizes_, gather_, true);
}

double GroupedMatmulWgrad::gather_cost(std::span<const ValueType> inputs) const {
  return gathered_wgrad_cost(cost(inputs, infer(inputs)).flops);
}

OperatorPtr make_grouped_matmul(const GroupedMatmulSpec& spec) {
  return std::make_shared<GroupedMatmul>(spec);
}

}  // namespace tessera
