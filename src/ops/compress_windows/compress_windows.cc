#include "ops/compress_windows/compress_windows.h"

#include <algorithm>
#include <memory>

#include "ops/storage.h"

namespace tessera {

int64_t num_entry_rows(int64_t num_tokens, int64_t rate) {
  return std::max<int64_t>(num_tokens / rate, 1);
}

CompressWindows::CompressWindows(const CompressSpec& spec) : spec_(spec) {
  require(spec.rate >= 1, "compress_windows: the rate must be at least 1, got {}", spec.rate);
}

std::string CompressWindows::attributes() const {
  return fmt::format("rate={}{}", spec_.rate, spec_.overlaps ? " overlaps" : "");
}

std::vector<ValueType> CompressWindows::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4, "takes kv, gate, bias and positions, got {} inputs",
              inputs.size());
  const ValueType& kv = inputs[kKv];
  check_shape(*this, is_storage(kv.dtype) && kv.shape.rank() == 2 && !kv.ragged(),
              "kv must be f32 or bf16 [T, features], got {}", kv.to_string());
  check_shape(*this, kv.shape[1] > 0 && kv.shape[1] % spec_.parts() == 0,
              "kv {} is not of {} equal parts", kv.to_string(), spec_.parts());
  check_shape(*this, inputs[kGate] == kv, "the gate is {}, expected {}", inputs[kGate].to_string(),
              kv.to_string());
  const ValueType bias{DType::kF32, {spec_.rate, kv.shape[1]}};
  check_shape(*this, inputs[kBias] == bias, "the bias is {}, expected {}",
              inputs[kBias].to_string(), bias.to_string());
  const ValueType positions{DType::kI32, {kv.shape[0]}};
  check_shape(*this, inputs[kPositions] == positions, "positions are {}, expected {}",
              inputs[kPositions].to_string(), positions.to_string());
  const int64_t rows = num_entry_rows(kv.shape[0], spec_.rate);
  return {{kv.dtype, {rows, kv.shape[1] / spec_.parts()}}, {DType::kI32, {rows}}};
}

void CompressWindows::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kEntries);
  if (!grad) return;
  const auto grads = builder.emit(std::make_shared<CompressWindowsBackward>(*this),
                                  {builder.input(kKv), builder.input(kGate), builder.input(kBias),
                                   builder.input(kPositions), *grad},
                                  {kBias});
  if (builder.needs_grad(kKv)) builder.set_grad_input(kKv, grads[CompressWindowsBackward::kGradKv]);
  if (builder.needs_grad(kGate))
    builder.set_grad_input(kGate, grads[CompressWindowsBackward::kGradGate]);
}

std::vector<ValueType> CompressWindowsBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 5,
              "takes kv, gate, bias, positions and gradient, got {} inputs", inputs.size());
  const ValueType entries = forward_.infer(inputs.first(kGrad))[CompressWindows::kEntries];
  check_shape(*this, inputs[kGrad] == entries, "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), entries.to_string());
  return {inputs[kKv], inputs[kGate], inputs[kBias]};
}

OperatorPtr make_compress_windows(const CompressSpec& spec) {
  return std::make_shared<CompressWindows>(spec);
}

}  // namespace tessera
