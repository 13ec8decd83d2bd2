#include "ops/kda_gates/kda_gates.h"

#include "ops/storage.h"

namespace tessera {
namespace {

void check_gates(const Operator& op, std::span<const ValueType> inputs, size_t count) {
  check_shape(op, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& a = inputs[KdaGates::kA];
  const ValueType& b = inputs[KdaGates::kB];
  check_shape(op, is_storage(b.dtype) && b.shape.rank() == 2 && b.ragged_dim < 0,
              "b is {}, expected f32 or bf16 [T,N]", b.to_string());
  const int64_t heads = b.shape[1];
  check_shape(op,
              a.dtype == b.dtype && a.shape.rank() == 2 && a.ragged_dim < 0 &&
                  a.shape[0] == b.shape[0] && a.shape[1] >= heads && a.shape[1] % heads == 0,
              "a is {}, expected {} [{}, a multiple of {} heads]", a.to_string(),
              dtype_name(b.dtype), b.shape[0], heads);
  const auto check = [&](int idx, int64_t size) {
    const ValueType expected{DType::kF32, {size}};
    check_shape(op, inputs[idx] == expected, "input {} is {}, expected {}", idx,
                inputs[idx].to_string(), expected.to_string());
  };
  check(KdaGates::kLogDecay, heads);
  check(KdaGates::kBias, a.shape[1]);
}

}  // namespace

std::vector<ValueType> KdaGates::infer(std::span<const ValueType> inputs) const {
  check_gates(*this, inputs, 4);
  return {{DType::kF32, inputs[kA].shape}, {DType::kF32, inputs[kB].shape}};
}

void KdaGates::differentiate(GradientBuilder& builder) const {
  const auto decay = builder.grad_output(kDecay);
  const auto beta = builder.grad_output(kBeta);
  if (!decay && !beta) return;
  ensure(decay && beta, "kda_gates: both outputs are read by one operator");
  using Backward = KdaGatesBackward;
  const auto grads = builder.emit(std::make_shared<Backward>(),
                                  {builder.input(kA), builder.input(kB), builder.input(kLogDecay),
                                   builder.input(kBias), *decay, *beta},
                                  {kLogDecay, kBias});
  if (builder.needs_grad(kA)) builder.set_grad_input(kA, grads[Backward::kGradA]);
  if (builder.needs_grad(kB)) builder.set_grad_input(kB, grads[Backward::kGradB]);
}

std::vector<ValueType> KdaGatesBackward::infer(std::span<const ValueType> inputs) const {
  check_gates(*this, inputs, 6);
  const auto check = [&](int grad, int of) {
    const ValueType expected{DType::kF32, inputs[of].shape};
    check_shape(*this, inputs[grad] == expected, "a gradient is {}, expected {}",
                inputs[grad].to_string(), expected.to_string());
  };
  check(kGradDecay, kA);
  check(kGradBeta, kB);
  return {inputs[kA], inputs[kB], inputs[kLogDecay], inputs[kBias]};
}

OperatorPtr make_kda_gates() {
  return std::make_shared<KdaGates>();
}

}  // namespace tessera
