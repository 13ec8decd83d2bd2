#include "ops/collective/collective.h"

namespace tessera {
namespace {

bool can_sum(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kI32 ||
         dtype == DType::kI64;
}

void check_parts(const CollectiveOperator& op, const ValueType& x) {
  check_shape(op, x.shape[0] % op.comm().size() == 0,
              "the {} rows of {} do not divide into a part for each of the {} ranks of group '{}'",
              x.shape[0], x.to_string(), op.comm().size(), op.comm().name());
}

/// The gradient of the only input, made by `op` from that of the only output.
void differentiate_by(GradientBuilder& builder, OperatorPtr op) {
  using Op = CollectiveOperator;
  const auto grad = builder.grad_output(Op::kY);
  if (grad) builder.set_grad_input(Op::kX, builder.emit(std::move(op), {*grad})[Op::kY]);
}

}  // namespace

CollectiveOperator::CollectiveOperator(CommunicatorPtr comm) : comm_(std::move(comm)) {
  ensure(comm_ != nullptr, "a collective operator without a communicator");
}

std::string CollectiveOperator::attributes() const {
  return fmt::format("group={} size={}", comm_->name(), comm_->size());
}

void CollectiveOperator::check_rows(std::span<const ValueType> inputs, bool may_be_ragged) const {
  const ValueType& x = inputs[kX];
  check_shape(*this, x.shape.rank() >= 1 && (may_be_ragged ? x.ragged_dim <= 0 : !x.ragged()),
              "input {} must have rows{}, got {}", static_cast<int>(kX),
              may_be_ragged ? "" : ", not ragged ones", x.to_string());
  check_shape(*this, takes_scaled_rows(x.format()), "scales must be of single rows, got {}",
              x.to_string());
}

std::vector<ValueType> AllGather::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  check_rows(inputs, false);
  ValueType result = inputs[kX];
  result.shape[0] *= comm().size();
  return {result};
}

void AllGather::differentiate(GradientBuilder& builder) const {
  differentiate_by(builder, make_reduce_scatter(comm_ptr()));
}

std::vector<ValueType> ReduceScatter::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  check_rows(inputs, false);
  check_shape(*this, can_sum(inputs[kX].dtype) || inputs[kX].dtype == DType::kBF16,
              "cannot sum elements of type {}", dtype_name(inputs[kX].dtype));
  check_parts(*this, inputs[kX]);
  ValueType result = inputs[kX];
  result.shape[0] /= comm().size();
  return {result};
}

void ReduceScatter::differentiate(GradientBuilder& builder) const {
  differentiate_by(builder, make_all_gather(comm_ptr()));
}

std::vector<ValueType> AllReduceConstant::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  check_shape(*this, can_sum(inputs[kX].dtype) && !inputs[kX].ragged(),
              "takes f32, f64, i32 or i64, not ragged, got {}", inputs[kX].to_string());
  return {inputs[kX]};
}

std::vector<ValueType> AllToAll::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  check_rows(inputs, false);
  check_parts(*this, inputs[kX]);
  return {inputs[kX]};
}

void AllToAll::differentiate(GradientBuilder& builder) const {
  differentiate_by(builder, make_all_to_all(comm_ptr()));
}

OperatorPtr make_all_gather(CommunicatorPtr comm) {
  return std::make_shared<AllGather>(std::move(comm));
}
OperatorPtr make_reduce_scatter(CommunicatorPtr comm) {
  return std::make_shared<ReduceScatter>(std::move(comm));
}
OperatorPtr make_all_reduce_constant(CommunicatorPtr comm) {
  return std::make_shared<AllReduceConstant>(std::move(comm));
}
OperatorPtr make_all_to_all(CommunicatorPtr comm) {
  return std::make_shared<AllToAll>(std::move(comm));
}

}  // namespace tessera
