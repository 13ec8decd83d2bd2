#include "ops/grouped_matmul/grouped_matmul.h"

namespace tessera {
namespace {

bool is_matrix(const ValueType& type) {
  return (type.dtype == DType::kF32 || type.dtype == DType::kBF16) && type.shape.rank() == 2;
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

}  // namespace

GroupedMatmul::GroupedMatmul(const GroupedMatmulSpec& spec)
    : sizes_(spec.group_sizes, "grouped_matmul"), side_(spec.side) {}

std::string GroupedMatmul::attributes() const {
  return fmt::format("{} experts={}", side_ == GroupedSide::kOut ? "out" : "in",
                     sizes_.to_string());
}

std::vector<ValueType> GroupedMatmul::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes a, weight and offsets, got {} inputs",
              inputs.size());
  const ValueType& a = inputs[0];
  const ValueType& weight = inputs[1];
  check_shape(*this, is_matrix(weight) && weight.shape[0] == sizes_.total(),
              "weight must be f32 or bf16 [{}, H], got {}", sizes_.total(), weight.to_string());
  const int64_t hidden_size = weight.shape[1];
  const bool out = side_ == GroupedSide::kOut;
  const int64_t width = out ? hidden_size : sizes_.largest();
  check_shape(*this, is_matrix(a) && a.dtype == weight.dtype && a.shape[1] == width,
              "a must be {} [R, {}], got {}", dtype_name(weight.dtype), width, a.to_string());
  check_offsets(*this, inputs[2], sizes_.num_experts());
  return {with_last_dim(a, out ? sizes_.largest() : hidden_size)};
}

Cost GroupedMatmul::cost(std::span<const ValueType> inputs,
                         std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = product_flops(inputs[0].shape[0], inputs[1].shape[1], sizes_);
  return cost;
}

void GroupedMatmul::differentiate(GradientBuilder& builder) const {
  const bool out = side_ == GroupedSide::kOut;
  const ValueId grad = *builder.grad_output(0);
  if (builder.needs_grad(0)) {
    const GroupedMatmulSpec other{sizes_.values(), out ? GroupedSide::kIn : GroupedSide::kOut};
    builder.set_grad_input(
        0, builder.emit(make_grouped_matmul(other), {grad, builder.input(1), builder.input(2)})[0]);
  }
  if (builder.needs_grad(1)) {
    const ValueId a = builder.input(0);
    builder.emit(std::make_shared<GroupedMatmulWgrad>(sizes_),
                 {out ? grad : a, out ? a : grad, builder.input(2)}, {1});
  }
}

std::vector<ValueType> GroupedMatmulWgrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes narrow, wide and offsets, got {} inputs",
              inputs.size());
  const ValueType& narrow = inputs[0];
  const ValueType& wide = inputs[1];
  check_shape(*this, is_matrix(narrow) && narrow.shape[1] == sizes_.largest(),
              "narrow must be f32 or bf16 [R, {}], got {}", sizes_.largest(), narrow.to_string());
  check_shape(*this,
              is_matrix(wide) && wide.dtype == narrow.dtype && wide.shape[0] == narrow.shape[0],
              "wide must be {} [{}, H], got {}", dtype_name(narrow.dtype), narrow.shape[0],
              wide.to_string());
  check_offsets(*this, inputs[2], sizes_.num_experts());
  return {{.dtype = DType::kF32, .shape = {sizes_.total(), wide.shape[1]}}};
}

Cost GroupedMatmulWgrad::cost(std::span<const ValueType> inputs,
                              std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = product_flops(inputs[1].shape[0], inputs[1].shape[1], sizes_);
  return cost;
}

OperatorPtr make_grouped_matmul(const GroupedMatmulSpec& spec) {
  return std::make_shared<GroupedMatmul>(spec);
}

}  // namespace tessera
