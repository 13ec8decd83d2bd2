#include "ops/delta_gates/delta_gates.h"

#include "ops/storage.h"

namespace tessera {
namespace {

void check_gates(const Operator& op, std::span<const ValueType> inputs, size_t count) {
  check_shape(op, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& a = inputs[DeltaGates::kA];
  check_shape(op, is_storage(a.dtype) && a.shape.rank() == 2 && a.ragged_dim < 0,
              "a is {}, expected f32 or bf16 [T,N]", a.to_string());
  check_shape(op, inputs[DeltaGates::kB] == a, "b is {}, expected {}",
              inputs[DeltaGates::kB].to_string(), a.to_string());
  const ValueType per_head{DType::kF32, {a.shape[1]}};
  for (const int idx : {DeltaGates::kLogDecay, DeltaGates::kBias}) {
    check_shape(op, inputs[idx] == per_head, "input {} is {}, expected {}", idx,
                inputs[idx].to_string(), per_head.to_string());
  }
}

}  // namespace

std::vector<ValueType> DeltaGates::infer(std::span<const ValueType> inputs) const {
  check_gates(*this, inputs, 4);
  const ValueType gate{DType::kF32, inputs[kA].shape};
  return {gate, gate};
}

void DeltaGates::differentiate(GradientBuilder& builder) const {
  const auto decay = builder.grad_output(kDecay);
  const auto beta = builder.grad_output(kBeta);
  if (!decay && !beta) return;
  ensure(decay && beta, "delta_gates: both outputs are read by one operator");
  using Backward = DeltaGatesBackward;
  const auto grads = builder.emit(std::make_shared<Backward>(),
                                  {builder.input(kA), builder.input(kB), builder.input(kLogDecay),
                                   builder.input(kBias), *decay, *beta},
                                  {kLogDecay, kBias});
  if (builder.needs_grad(kA)) builder.set_grad_input(kA, grads[Backward::kGradA]);
  if (builder.needs_grad(kB)) builder.set_grad_input(kB, grads[Backward::kGradB]);
}

std::vector<ValueType> DeltaGatesBackward::infer(std::span<const ValueType> inputs) const {
  check_gates(*this, inputs, 6);
  const ValueType gate{DType::kF32, inputs[kA].shape};
  for (const int idx : {kGradDecay, kGradBeta}) {
    check_shape(*this, inputs[idx] == gate, "a gradient is {}, expected {}",
                inputs[idx].to_string(), gate.to_string());
  }
  return {inputs[kA], inputs[kB], inputs[kLogDecay], inputs[kBias]};
}

OperatorPtr make_delta_gates() {
  return std::make_shared<DeltaGates>();
}

}  // namespace tessera
