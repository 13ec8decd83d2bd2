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
  const auto grad = builder.grad_output(0);
  if (grad) builder.set_grad_input(0, builder.emit(std::move(op), {*grad})[0]);
}

}  // namespace

CollectiveOperator::CollectiveOperator(CommunicatorPtr comm) : comm_(std::move(comm)) {
  ensure(comm_ != nullptr, "a collective operator without a communicator");
}

std::string CollectiveOperator::attributes() const {
  return fmt::format("group={} size={}", comm_->name(), comm_->size());
}

void CollectiveOperator::check_rows(std::span<const ValueType> inputs, size_t idx,
                                    bool may_be_ragged) const {
  const ValueType& x = inputs[idx];
  check_shape(*this, x.shape.rank() >= 1 && (may_be_ragged ? x.ragged_dim <= 0 : !x.ragged()),
              "input {} must have rows{}, got {}", idx, may_be_ragged ? "" : ", not ragged ones",
              x.to_string());
}

std::vector<ValueType> AllGather::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  check_rows(inputs, 0, false);
  ValueType result = inputs[0];
  result.shape[0] *= comm().size();
  return {result};
}

void AllGather::differentiate(GradientBuilder& builder) const {
  differentiate_by(builder, make_reduce_scatter(comm_ptr()));
}

std::vector<ValueType> ReduceScatter::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  check_rows(inputs, 0, false);
  check_shape(*this, can_sum(inputs[0].dtype) || inputs[0].dtype == DType::kBF16,
              "cannot sum elements of type {}", dtype_name(inputs[0].dtype));
  check_parts(*this, inputs[0]);
  ValueType result = inputs[0];
  result.shape[0] /= comm().size();
  return {result};
}

void ReduceScatter::differentiate(GradientBuilder& builder) const {
  differentiate_by(builder, make_all_gather(comm_ptr()));
}

std::vector<ValueType> AllReduceConstant::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  check_shape(*this, can_sum(inputs[0].dtype) && !inputs[0].ragged(),
              "takes f32, f64, i32 or i64, not ragged, got {}", inputs[0].to_string());
  return {inputs[0]};
}

std::vector<ValueType> AllToAll::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  check_rows(inputs, 0, false);
  check_parts(*this, inputs[0]);
  return {inputs[0]};
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
