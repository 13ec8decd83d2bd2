#include "ops/collective/ragged_collective.h"

namespace tessera {

RaggedCollective::RaggedCollective(CommunicatorPtr comm, int64_t max_rows)
    : CollectiveOperator(std::move(comm)), max_rows_(max_rows) {
  ensure(max_rows >= 0, "a ragged collective with at most {} rows", max_rows);
}

std::string RaggedCollective::attributes() const {
  return fmt::format("{} max_rows={}", CollectiveOperator::attributes(), max_rows_);
}

ValueType RaggedCollective::infer_rows(std::span<const ValueType> inputs, int num_counts) const {
  const int extent = 1 + num_counts;  // behind x and the counts
  check_shape(*this, std::ssize(inputs) == extent || std::ssize(inputs) == extent + 1,
              "takes {} inputs, and one more for a ragged output, got {}", extent, inputs.size());
  check_rows(inputs, true);
  const ValueType expected{.dtype = DType::kI64, .shape = {comm().size()}};
  for (const ValueType& counts : inputs.subspan(1, num_counts)) {
    check_shape(*this, counts == expected, "the counts of rows must be {}, got {}",
                expected.to_string(), counts.to_string());
  }
  ValueType result{.dtype = inputs[kX].dtype, .shape = inputs[kX].shape, .scale = inputs[kX].scale};
  result.shape[0] = max_rows_;
  if (std::ssize(inputs) == extent) return result;
  check_shape(*this, inputs[extent].dtype == DType::kI64 && inputs[extent].shape == Shape{1},
              "the extent must be i64 [1], got {}", inputs[extent].to_string());
  result.ragged_dim = 0;
  result.extent = Extent::own_input(extent);
  return result;
}

void RaggedCollective::differentiate_rows(GradientBuilder& builder, OperatorPtr op,
                                          const std::vector<int>& counts) {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  std::vector<ValueId> inputs = {*grad};
  for (const int idx : counts) inputs.push_back(builder.input(idx));
  if (builder.input_type(kX).ragged()) inputs.push_back(builder.input_extent(kX));
  builder.set_grad_input(kX, builder.emit(std::move(op), inputs)[kY]);
}

std::vector<ValueType> AllToAllV::infer(std::span<const ValueType> inputs) const {
  return {infer_rows(inputs, kExtent - kSendRows)};
}

void AllToAllV::differentiate(GradientBuilder& builder) const {
  differentiate_rows(builder,
                     make_all_to_all_v(comm_ptr(), builder.input_type(kX).shape[0], counts_),
                     {kReceiveRows, kSendRows});
}

std::vector<ValueType> AllGatherV::infer(std::span<const ValueType> inputs) const {
  return {infer_rows(inputs, kExtent - kCounts)};
}

void AllGatherV::differentiate(GradientBuilder& builder) const {
  differentiate_rows(builder, make_reduce_scatter_v(comm_ptr(), builder.input_type(kX).shape[0]),
                     {kCounts});
}

std::vector<ValueType> ReduceScatterV::infer(std::span<const ValueType> inputs) const {
  const ValueType result = infer_rows(inputs, kExtent - kCounts);
  check_shape(*this,
              result.dtype == DType::kF32 || result.dtype == DType::kBF16 ||
                  result.dtype == DType::kF64 || result.dtype == DType::kI32 ||
                  result.dtype == DType::kI64,
              "cannot sum elements of type {}", dtype_name(result.dtype));
  return {result};
}

void ReduceScatterV::differentiate(GradientBuilder& builder) const {
  differentiate_rows(builder, make_all_gather_v(comm_ptr(), builder.input_type(kX).shape[0]),
                     {kCounts});
}

OperatorPtr make_all_to_all_v(CommunicatorPtr comm, int64_t max_rows, CountsOf counts) {
  return std::make_shared<AllToAllV>(std::move(comm), max_rows, counts);
}
OperatorPtr make_all_gather_v(CommunicatorPtr comm, int64_t max_rows) {
  return std::make_shared<AllGatherV>(std::move(comm), max_rows);
}
OperatorPtr make_reduce_scatter_v(CommunicatorPtr comm, int64_t max_rows) {
  return std::make_shared<ReduceScatterV>(std::move(comm), max_rows);
}

}  // namespace tessera
