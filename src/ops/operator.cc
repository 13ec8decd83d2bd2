#include "ops/operator.h"

#include "comm/communicator.h"

namespace tessera {

std::string ValueType::to_string() const {
  std::string dims;
  for (int dim = 0; dim < shape.rank(); ++dim) {
    if (dim > 0) dims += ", ";
    dims += dim == ragged_dim ? fmt::format("<={} by %{}", shape[dim], extent)
                              : fmt::format("{}", shape[dim]);
  }
  return fmt::format("{} [{}]", dtype_name(dtype), dims);
}

ValueType with_dtype(ValueType type, DType dtype) {
  type.dtype = dtype;
  return type;
}

ValueType with_last_dim(ValueType type, int64_t last) {
  type.shape[type.shape.rank() - 1] = last;
  return type;
}

Cost& Cost::operator+=(const Cost& other) {
  flops += other.flops;
  bytes += other.bytes;
  return *this;
}

Cost Operator::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost total;
  for (const ValueType& type : inputs) total.bytes += static_cast<double>(type.num_bytes());
  for (const ValueType& type : outputs) total.bytes += static_cast<double>(type.num_bytes());
  return total;
}

void Operator::differentiate(GradientBuilder& /*builder*/) const {
  throw InternalError(fmt::format("operator '{}' has no gradient rule", name()));
}

void Kernel::operator()(const Operator& op, const KernelArgs& args) const {
  start(op, args).wait();
}

Pending Kernel::start(const Operator& op, const KernelArgs& args) const {
  if (start_ != nullptr) return start_(op, args);
  ensure(run_ != nullptr, "operator '{}' has an empty kernel", op.name());
  run_(op, args);
  return {};
}

}  // namespace tessera
