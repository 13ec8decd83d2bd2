#include <cmath>

#include "ops/cpu_dispatch.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/simd.h"

namespace tessera {
namespace {

float sigmoid_of(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

template <typename T>
void gate_rows(const Args<SigmoidGate>& args) {
  using Op = SigmoidGate;
  const T* y = args.in(Op::kX).as<T>();
  const T* logit = args.in(Op::kLogit).as<T>();
  T* out = args.out(Op::kY).as<T>();
  const int64_t width = args.in(Op::kX).shape.last();
  const int64_t rows = args.in(Op::kX).shape[0];
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float gate = sigmoid_of(logit[row]);
    const int64_t at = row * width;
    simd::for_each_vector(width, [&](int64_t i, auto lanes) {
      simd::store(out + at + i, simd::load(y + at + i, lanes) * gate, lanes);
    });
  }
}

template <typename T>
void gate_rows_backward(const Args<SigmoidGateBackward>& args) {
  using Op = SigmoidGateBackward;
  const T* y = args.in(Op::kX).as<T>();
  const T* logit = args.in(Op::kLogit).as<T>();
  const T* grad = args.in(Op::kGrad).as<T>();
  T* grad_y = args.out(Op::kGradX).as<T>();
  T* grad_logit = args.out(Op::kGradLogit).as<T>();
  const int64_t width = args.in(Op::kX).shape.last();
  const int64_t rows = args.in(Op::kX).shape[0];
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float gate = sigmoid_of(logit[row]);
    const int64_t at = row * width;
    simd::Vec dot{};
    simd::for_each_vector(width, [&](int64_t i, auto lanes) {
      const simd::Vec g = simd::load(grad + at + i, lanes);
      dot += g * simd::load(y + at + i, lanes);
      simd::store(grad_y + at + i, g * gate, lanes);
    });
    grad_logit[row] = T(simd::sum(dot) * gate * (1.0F - gate));
  }
}

template <typename T>
void gate_elements(const Args<SigmoidGate>& args) {
  using Op = SigmoidGate;
  const Tensor& x = args.in(Op::kX);
  const T* y = x.as<T>();
  const T* logit = args.in(Op::kLogit).as<T>();
  T* out = args.out(Op::kY).as<T>();
  const int64_t width = x.shape.last();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < x.shape[0]; ++row) {
    const int64_t at = row * width;
    simd::for_each_vector(width, [&](int64_t i, auto lanes) {
      const simd::Vec gate = simd::sigmoid(simd::load(logit + at + i, lanes));
      simd::store(out + at + i, simd::load(y + at + i, lanes) * gate, lanes);
    });
  }
}

template <typename T>
void gate_elements_backward(const Args<SigmoidGateBackward>& args) {
  using Op = SigmoidGateBackward;
  const Tensor& x = args.in(Op::kX);
  const T* y = x.as<T>();
  const T* logit = args.in(Op::kLogit).as<T>();
  const T* grad = args.in(Op::kGrad).as<T>();
  T* grad_y = args.out(Op::kGradX).as<T>();
  T* grad_logit = args.out(Op::kGradLogit).as<T>();
  const int64_t width = x.shape.last();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < x.shape[0]; ++row) {
    const int64_t at = row * width;
    simd::for_each_vector(width, [&](int64_t i, auto lanes) {
      const simd::Vec gate = simd::sigmoid(simd::load(logit + at + i, lanes));
      const simd::Vec of_gated = simd::load(grad + at + i, lanes) * gate;
      const simd::Vec value = simd::load(y + at + i, lanes);
      simd::store(grad_y + at + i, of_gated, lanes);
      simd::store(grad_logit + at + i, of_gated * value * (1.0F - gate), lanes);
    });
  }
}

/// Whether each element has a gate; rows of one element are gated as rows.
bool gates_elements(const Tensor& logit) {
  return logit.shape[1] != 1;
}

void sigmoid_gate_kernel(const SigmoidGate& /*op*/, const Args<SigmoidGate>& args) {
  if (gates_elements(args.in(SigmoidGate::kLogit))) {
    return args.out(SigmoidGate::kY).dtype == DType::kF32 ? gate_elements<float>(args)
                                                          : gate_elements<Bf16>(args);
  }
  args.out(SigmoidGate::kY).dtype == DType::kF32 ? gate_rows<float>(args) : gate_rows<Bf16>(args);
}

void sigmoid_gate_backward_kernel(const SigmoidGateBackward& /*op*/,
                                  const Args<SigmoidGateBackward>& args) {
  if (gates_elements(args.in(SigmoidGateBackward::kLogit))) {
    return args.out(SigmoidGateBackward::kGradX).dtype == DType::kF32
               ? gate_elements_backward<float>(args)
               : gate_elements_backward<Bf16>(args);
  }
  args.out(SigmoidGateBackward::kGradX).dtype == DType::kF32 ? gate_rows_backward<float>(args)
                                                             : gate_rows_backward<Bf16>(args);
}

}  // namespace

TESSERA_CPU_KERNELS(add_sigmoid_gate_cpu, table) {
  add_kernel<SigmoidGate>(table, sigmoid_gate_kernel);
  add_kernel<SigmoidGateBackward>(table, sigmoid_gate_backward_kernel);
}

}  // namespace tessera
