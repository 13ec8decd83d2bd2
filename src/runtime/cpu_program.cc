#include "runtime/cpu_program.h"

#include <algorithm>

namespace tessera {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

CpuProgram::CpuProgram(Program program, const KernelTable& kernels,
                       const std::vector<ValueId>& saved)
    : program_(std::move(program)), plan_(plan_memory(program_, saved)) {
  for (const Node& node : program_.nodes()) {
    const auto found = kernels.find(node.op->name());
    ensure(found != kernels.end(), "program '{}': no CPU kernel for operator '{}'", program_.name(),
           node.op->name());
    kernels_.push_back(found->second);
  }
}

Bindings CpuProgram::make_bindings() const {
  Bindings bindings;
  bindings.tensors.resize(static_cast<size_t>(program_.num_values()));
  return bindings;
}

Tensor CpuProgram::at_bound(const Bindings& bindings, ValueId id) const {
  const Placement& placement = plan_.values[static_cast<size_t>(id)];
  const ValueType& type = program_.type(id);
  if (placement.storage == Storage::kBound) return bindings.tensors[static_cast<size_t>(id)];
  std::byte* slab = placement.storage == Storage::kSaved ? bindings.saved : bindings.transient;
  return {slab + placement.offset, type.dtype, type.shape};
}

Tensor CpuProgram::view(const Bindings& bindings, ValueId id) const {
  Tensor tensor = at_bound(bindings, id);
  const ValueType& type = program_.type(id);
  if (!tensor || !type.ragged()) return tensor;
  const int64_t extent = *at_bound(bindings, type.extent).as<int64_t>();
  ensure(extent >= 0 && extent <= type.shape[type.ragged_dim],
         "'{}' has extent {} over its bound {}", program_.value(id).name, extent,
         type.shape[type.ragged_dim]);
  tensor.shape[type.ragged_dim] = extent;
  return tensor;
}

void CpuProgram::check_bindings(const Bindings& bindings) const {
  ensure(bindings.tensors.size() == program_.values().size(),
         "program '{}': {} bindings for {} values", program_.name(), bindings.tensors.size(),
         program_.values().size());
  for (ValueId id = 0; id < program_.num_values(); ++id) {
    if (plan_.values[static_cast<size_t>(id)].storage != Storage::kBound) continue;
    const Tensor& tensor = bindings.tensors[static_cast<size_t>(id)];
    const Value& value = program_.value(id);
    if (!tensor && value.kind == ValueKind::kAccumulator) continue;
    ensure(tensor && tensor.dtype == value.type.dtype && tensor.shape == value.type.shape,
           "program '{}': '{}' is bound to {} {}, expected {}", program_.name(), value.name,
           tensor ? dtype_name(tensor.dtype) : "nothing", tensor.shape.to_string(),
           value.type.to_string());
  }
}

void CpuProgram::run_node(size_t idx, const Bindings& bindings) const {
  const Node& node = program_.nodes()[idx];
  std::vector<Tensor> inputs;
  inputs.reserve(node.inputs.size());
  for (const ValueId id : node.inputs) inputs.push_back(view(bindings, id));
  std::vector<Tensor> outputs;
  outputs.reserve(node.outputs.size());
  for (const ValueId id : node.outputs) {
    const ValueType& type = program_.type(id);
    const bool extent_is_own =
        type.ragged() && std::ranges::find(node.outputs, type.extent) != node.outputs.end();
    outputs.push_back(extent_is_own ? at_bound(bindings, id) : view(bindings, id));
  }
  std::span<std::byte> workspace;
  if (plan_.workspace_bytes[idx] > 0) {
    workspace = {bindings.transient + plan_.workspace_offsets[idx],
                 static_cast<size_t>(plan_.workspace_bytes[idx])};
  }
  kernels_[idx](*node.op, {inputs, outputs, workspace});
}

void CpuProgram::run(const Bindings& bindings, const NodeObserver& observer) const {
  check_bindings(bindings);
  for (size_t i = 0; i < program_.nodes().size(); ++i) {
    const auto start = std::chrono::steady_clock::now();
    run_node(i, bindings);
    if (observer) observer(program_.nodes()[i], seconds_since(start));
  }
}

}  // namespace tessera
