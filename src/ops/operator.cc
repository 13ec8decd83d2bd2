#include "ops/operator.h"

#include "comm/communicator.h"
#include "core/device.h"

namespace tessera {

std::string Extent::to_string() const {
  switch (kind_) {
    case Kind::kNone:
      return "nothing";
    case Kind::kValue:
      return fmt::format("%{}", index_);
    case Kind::kOwnOutput:
      return fmt::format("output {}", index_);
    case Kind::kOwnInput:
      return fmt::format("input {}", index_);
  }
  throw InternalError("unknown kind of extent");
}

std::string ValueType::to_string() const {
  std::string dims;
  for (int dim = 0; dim < shape.rank(); ++dim) {
    if (dim > 0) dims += ", ";
    dims += dim == ragged_dim ? fmt::format("<={} by {}", shape[dim], extent.to_string())
                              : fmt::format("{}", shape[dim]);
  }
  return fmt::format("{} [{}]", format().name(), dims);
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

int64_t KernelContext::read_count(const Tensor& count) {
  int64_t value = 0;
  ensure(count.device != nullptr, "a count of the host was read as a device's");
  count.device->copy(&value, count.data, sizeof(value));
  return value;
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

bool is_unscaled(const Format& format) {
  return !format.scale.is_scaled() && format.element != DType::kF16 &&
         format.element != DType::kE4M3 && format.element != DType::kE5M2;
}

bool takes_f16(const Format& format) {
  return is_unscaled(format) || format == Format(DType::kF16);
}

void Kernel::check_class(const Operator& op) const {
  if (class_ == nullptr) return;
  const std::type_info& given = typeid(op);
  ensure(given == *class_, "operator '{}' is of class {}, but its kernel is for {}", op.name(),
         given.name(), class_->name());
}

int64_t Kernel::workspace_bytes(const Operator& op, std::span<const ValueType> inputs) const {
  if (!options_.workspace) return 0;
  check_class(op);
  return options_.workspace(op, inputs);
}

void Kernel::operator()(const Operator& op, const KernelArgs& args) const {
  start(op, args).wait();
}

Pending Kernel::start(const Operator& op, const KernelArgs& args) const {
  check_class(op);
  if (start_) return start_(op, args);
  ensure(run_ != nullptr, "operator '{}' has an empty kernel", op.name());
  run_(op, args);
  return {};
}

}  // namespace tessera
