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
void gate_rows(const KernelArgs& args) {
  const T* y = args.in(0).as<T>();
  const T* logit = args.in(1).as<T>();
  T* out = args.out(0).as<T>();
  const int64_t width = args.in(0).shape.last();
  const int64_t rows = args.in(0).shape[0];
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
void gate_rows_backward(const KernelArgs& args) {
  const T* y = args.in(0).as<T>();
  const T* logit = args.in(1).as<T>();
  const T* grad = args.in(2).as<T>();
  T* grad_y = args.out(0).as<T>();
  T* grad_logit = args.out(1).as<T>();
  const int64_t width = args.in(0).shape.last();
  const int64_t rows = args.in(0).shape[0];
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

void sigmoid_gate_kernel(const Operator& /*op*/, const KernelArgs& args) {
  args.out(0).dtype == DType::kF32 ? gate_rows<float>(args) : gate_rows<Bf16>(args);
}

void sigmoid_gate_backward_kernel(const Operator& /*op*/, const KernelArgs& args) {
  args.out(0).dtype == DType::kF32 ? gate_rows_backward<float>(args)
                                   : gate_rows_backward<Bf16>(args);
}

}  // namespace

TESSERA_CPU_KERNELS(add_sigmoid_gate_cpu, table) {
  table["sigmoid_gate"] = sigmoid_gate_kernel;
  table["sigmoid_gate_backward"] = sigmoid_gate_backward_kernel;
}

}  // namespace tessera
