#include <algorithm>
#include <cmath>

#include "ops/cpu_dispatch.h"
#include "ops/delta_gates/delta_gates.h"
#include "ops/storage.h"

namespace tessera {
namespace {

float logistic(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

/// log(1 + e^x), without overflow.
float softplus(float x) {
  return std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x)));
}

void delta_gates(const DeltaGates& /*op*/, const Args<DeltaGates>& args) {
  using Op = DeltaGates;
  const Tensor& a = args.in(Op::kA);
  const int64_t tokens = a.shape[0];
  const int64_t heads = a.shape[1];
  const float* log_decay = args.in(Op::kLogDecay).as<float>();
  const float* bias = args.in(Op::kBias).as<float>();
  float* decay = args.out(Op::kDecay).as<float>();
  float* beta = args.out(Op::kBeta).as<float>();
  with_storage(a.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from_a = a.as<T>();
    const T* from_b = args.in(Op::kB).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t at = t * heads + n;
        decay[at] = -std::exp(log_decay[n]) * softplus(static_cast<float>(from_a[at]) + bias[n]);
        beta[at] = logistic(static_cast<float>(from_b[at]));
      }
    }
  });
}

void delta_gates_backward(const DeltaGatesBackward& /*op*/, const Args<DeltaGatesBackward>& args) {
  using Op = DeltaGatesBackward;
  const Tensor& a = args.in(Op::kA);
  const int64_t tokens = a.shape[0];
  const int64_t heads = a.shape[1];
  const float* log_decay = args.in(Op::kLogDecay).as<float>();
  const float* bias = args.in(Op::kBias).as<float>();
  const float* grad_decay = args.in(Op::kGradDecay).as<float>();
  const float* grad_beta = args.in(Op::kGradBeta).as<float>();
  const auto accumulator = [&](Op::Output output) {
    return args.out(output) ? args.out(output).template as<float>() : nullptr;
  };
  float* grad_log_decay = accumulator(Op::kGradLogDecay);
  float* grad_bias = accumulator(Op::kGradBias);
  with_storage(a.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from_a = a.as<T>();
    const T* from_b = args.in(Op::kB).as<T>();
    T* grad_a = args.out(Op::kGradA).as<T>();
    T* grad_b = args.out(Op::kGradB).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < heads; ++n) {
      const float rate = -std::exp(log_decay[n]);
      double of_rate = 0;
      double of_bias = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t at = t * heads + n;
        const float step = static_cast<float>(from_a[at]) + bias[n];
        const float of_step = grad_decay[at] * rate * logistic(step);
        const float strength = logistic(static_cast<float>(from_b[at]));
        of_rate += static_cast<double>(grad_decay[at] * rate * softplus(step));
        of_bias += static_cast<double>(of_step);
        grad_a[at] = T(of_step);
        grad_b[at] = T(grad_beta[at] * strength * (1.0F - strength));
      }
      if (grad_log_decay != nullptr) grad_log_decay[n] += static_cast<float>(of_rate);
      if (grad_bias != nullptr) grad_bias[n] += static_cast<float>(of_bias);
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_delta_gates_cpu, table) {
  add_kernel<DeltaGates>(table, delta_gates);
  add_kernel<DeltaGatesBackward>(table, delta_gates_backward);
}

}  // namespace tessera
