#include "ops/testing/gpu_kernel.h"

#include <algorithm>
#include <cmath>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

/// Random values rounded to BF16, of which only the first `extent` rows are numbers.
OwnedTensor rows_then_nan(const ValueType& type, int64_t extent, Random& random) {
  const OwnedTensor rounded = random_tensor(DType::kBF16, type.shape, random);
  OwnedTensor values(DType::kF32, type.shape);
  const int64_t width = type.shape.num_elements() / std::max<int64_t>(type.shape[0], 1);
  for (int64_t i = 0; i < type.shape.num_elements(); ++i)
    values.get().as<float>()[i] =
        i < extent * width ? static_cast<float>(rounded.get().as<Bf16>()[i]) : NAN;
  return values;
}

}  // namespace

ValueType ragged_rows(DType dtype, const Shape& shape) {
  return {.dtype = dtype, .shape = shape, .ragged_dim = 0, .extent = ValueId(0)};
}

void check_ragged_operator_on_gpu(const OperatorPtr& op,
                                  const std::function<OperatorInputs(DType)>& inputs,
                                  const std::vector<int>& outputs_with_grad, int64_t extent,
                                  const Backend& cpu, const Backend& gpu, GpuCheck check) {
  Random random(check.seed, 77);
  const OperatorInputs exact = inputs(DType::kF32);
  std::vector<OwnedTensor> kept;
  kept.push_back(tensor_of_i64({1}, {extent}));
  check.values["extent"] = kept.back();
  for (size_t i = 0; i < exact.names.size(); ++i) {
    if (!exact.types[i].ragged() || check.values.contains(exact.names[i])) continue;
    kept.push_back(rows_then_nan(exact.types[i], extent, random));
    check.values[exact.names[i]] = kept.back();
  }
  const auto build = [&](DType dtype) {
    CheckedProgram checked{Program(std::string(op->name())), {}};
    checked.program.add_input("extent", {.dtype = DType::kI64, .shape = {1}});
    const OperatorInputs given = inputs(dtype);
    std::vector<ValueId> ids;
    for (size_t i = 0; i < given.names.size(); ++i) {
      const bool weight = given.names[i].starts_with("w");
      ids.push_back(weight ? checked.program.add_weight(given.names[i], given.types[i])
                           : checked.program.add_input(given.names[i], given.types[i]));
    }
    const std::vector<ValueId> outputs =
        checked.program.add(op, ids, numbered_outputs(given.types, *op));
    checked.program.set_outputs(outputs);
    for (const int output : outputs_with_grad) checked.request.outputs.push_back(outputs[output]);
    for (size_t i = 0; i < ids.size() && !outputs_with_grad.empty(); ++i)
      if (given.names[i].starts_with("x")) checked.request.inputs.push_back(ids[i]);
    return checked;
  };
  check_on_gpu(build, cpu, gpu, check);
}

OwnedTensor copy_to(const Backend& backend, const Tensor& host) {
  OwnedTensor tensor(host.dtype, host.shape, "a test's tensor", backend.device());
  backend.device().copy(tensor.get().data, host.data, host.num_bytes());
  return tensor;
}

OwnedTensor copy_to_host(const Backend& backend, const Tensor& tensor) {
  OwnedTensor host(tensor.dtype, tensor.shape);
  backend.device().copy(host.get().data, tensor.data, tensor.num_bytes());
  return host;
}

void run_kernel(const Operator& op, const Backend& backend, std::span<const Tensor> inputs,
                std::span<const Tensor> outputs) {
  std::vector<ValueType> types;
  for (const Tensor& input : inputs)
    types.push_back({.dtype = input.dtype, .shape = input.shape, .scale = input.scale});
  const int64_t bytes = std::max<int64_t>(backend.workspace_bytes(op, types), 1);
  const Buffer workspace(bytes, "scratch memory", backend.device());
  const std::vector<std::byte> garbage(bytes, std::byte{0xFF});
  backend.device().copy(workspace.data(), garbage.data(), bytes);
  const std::vector<const int64_t*> extents(inputs.size() + outputs.size(), nullptr);
  backend.kernel(op)(op, {.inputs = inputs,
                          .outputs = outputs,
                          .workspace = {workspace.data(), static_cast<size_t>(bytes)},
                          .extents = extents,
                          .context = backend.context()});
  backend.device().synchronize();
}

}  // namespace tessera::testing
