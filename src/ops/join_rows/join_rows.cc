#include "ops/join_rows/join_rows.h"

#include <memory>

#include "ops/storage.h"

namespace tessera {
namespace {

void check_joined_rows(const Operator& op, const ValueType& x) {
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && !x.ragged(),
              "rows must be f32 or bf16 [R, D], got {}", x.to_string());
}

}  // namespace

std::vector<ValueType> JoinRows::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes two tensors, got {} inputs", inputs.size());
  const ValueType& a = inputs[kA];
  const ValueType& b = inputs[kB];
  check_joined_rows(*this, a);
  check_joined_rows(*this, b);
  check_shape(*this, a.dtype == b.dtype && a.shape[1] == b.shape[1],
              "rows of {} and {} differ in type or width", a.to_string(), b.to_string());
  return {{a.dtype, {a.shape[0] + b.shape[0], a.shape[1]}}};
}

void JoinRows::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad || (!builder.needs_grad(kA) && !builder.needs_grad(kB))) return;
  const auto parts =
      builder.emit(std::make_shared<SplitRows>(builder.input_type(kA).shape[0]), {*grad});
  if (builder.needs_grad(kA)) builder.set_grad_input(kA, parts[SplitRows::kA]);
  if (builder.needs_grad(kB)) builder.set_grad_input(kB, parts[SplitRows::kB]);
}

SplitRows::SplitRows(int64_t num_first) : num_first_(num_first) {
  require(num_first >= 0, "split_rows: the first part has {} rows", num_first);
}

std::string SplitRows::attributes() const {
  return fmt::format("first={}", num_first_);
}

std::vector<ValueType> SplitRows::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one tensor, got {} inputs", inputs.size());
  const ValueType& x = inputs[kX];
  check_joined_rows(*this, x);
  check_shape(*this, x.shape[0] >= num_first_, "{} has fewer than {} rows", x.to_string(),
              num_first_);
  return {{x.dtype, {num_first_, x.shape[1]}}, {x.dtype, {x.shape[0] - num_first_, x.shape[1]}}};
}

OperatorPtr make_join_rows() {
  return std::make_shared<JoinRows>();
}

}  // namespace tessera
