#include <algorithm>
#include <cmath>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/kda_gates/kda_gates.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

float logistic(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

/// log(1 + x) for x from 0 to 1: twice the series of the inverse hyperbolic tangent of x / (2 + x),
/// which is at most 1/3, so that 8 terms are exact to rounding.
simd::Vec log_1_plus(simd::Vec x) {
  const simd::Vec z = x / (2.0F + x);
  const simd::Vec square = z * z;
  simd::Vec sum = simd::broadcast(1.0F / 15.0F);
  for (const float odd : {13.0F, 11.0F, 9.0F, 7.0F, 5.0F, 3.0F, 1.0F})
    sum = sum * square + 1.0F / odd;
  return 2.0F * z * sum;
}

/// log(1 + e^x), without overflow.
simd::Vec softplus(simd::Vec x) {
  const simd::Vec zero{};
  return simd::max(x, zero) + log_1_plus(simd::exp(-simd::max(x, -x)));
}

/// Sizes and parameters of either pass.
struct GateSizes {
  int64_t tokens;
  int64_t heads;
  int64_t size;  // D
  const float* log_decay;
  const float* bias;

  template <typename Op>
  static GateSizes of(const Args<Op>& args) {
    const Tensor& b = args.in(Op::kB);
    return {.tokens = b.shape[0],
            .heads = b.shape[1],
            .size = args.in(Op::kA).shape[1] / b.shape[1],
            .log_decay = args.in(Op::kLogDecay).template as<float>(),
            .bias = args.in(Op::kBias).template as<float>()};
  }
  int64_t width() const { return heads * size; }
};

template <typename T>
void decay_head(float* decay, const T* a, const float* bias, float log_decay, int64_t size) {
  const float rate = -std::exp(log_decay);
  simd::for_each_vector(size, [&](int64_t i, auto lanes) {
    const simd::Vec step = simd::load(a + i, lanes) + simd::load(bias + i, lanes);
    simd::store(decay + i, rate * softplus(step), lanes);
  });
}

void kda_gates(const KdaGates& /*op*/, const Args<KdaGates>& args) {
  using Op = KdaGates;
  const auto sizes = GateSizes::of<Op>(args);
  float* decay = args.out(Op::kDecay).as<float>();
  float* beta = args.out(Op::kBeta).as<float>();
  with_storage(args.in(Op::kB).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* a = args.in(Op::kA).as<T>();
    const T* b = args.in(Op::kB).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < sizes.tokens * sizes.heads; ++row) {
      const int64_t head = row % sizes.heads;
      decay_head(decay + row * sizes.size, a + row * sizes.size, sizes.bias + head * sizes.size,
                 sizes.log_decay[head], sizes.size);
      beta[row] = logistic(static_cast<float>(b[row]));
    }
  });
}

/// A head of a token: writes the gradients of a, and adds those of dt_bias and of A_log, the latter
/// by element.
template <typename T>
struct DecayGrads {
  const T* a;
  const float* of_decay;
  const float* bias;
  float rate;
  int64_t size;

  void add(T* grad_a, float* of_bias, float* of_rate) const {
    simd::for_each_vector(size, [&](int64_t i, auto lanes) {
      const simd::Vec step = simd::load(a + i, lanes) + simd::load(bias + i, lanes);
      const simd::Vec scaled = rate * simd::load(of_decay + i, lanes);
      const simd::Vec of_step = scaled * simd::sigmoid(step);
      simd::store(grad_a + i, of_step, lanes);
      simd::store(of_bias + i, simd::load(of_bias + i, lanes) + of_step, lanes);
      simd::store(of_rate + i, simd::load(of_rate + i, lanes) + scaled * softplus(step), lanes);
    });
  }
};

template <typename T>
void write_strength_grads(const Args<KdaGatesBackward>& args) {
  using Op = KdaGatesBackward;
  const T* b = args.in(Op::kB).as<T>();
  const float* of_beta = args.in(Op::kGradBeta).as<float>();
  T* grad_b = args.out(Op::kGradB).as<T>();
  for (int64_t i = 0; i < args.in(Op::kB).num_elements(); ++i) {
    const float strength = logistic(static_cast<float>(b[i]));
    grad_b[i] = T(of_beta[i] * strength * (1.0F - strength));
  }
}

/// Sums over the tokens, those of A_log by element, in scratch memory behind that of the sums.
template <typename T>
std::span<const float> sum_decay_grads(const GateSizes& sizes, const Args<KdaGatesBackward>& args) {
  using Op = KdaGatesBackward;
  const int64_t width = sizes.width();
  const T* a = args.in(Op::kA).as<T>();
  const float* of_decay = args.in(Op::kGradDecay).as<float>();
  T* grad_a = args.out(Op::kGradA).as<T>();
  auto* totals =
      reinterpret_cast<float*>(args.workspace.subspan(column_sums_bytes(2 * width)).data());
  std::fill_n(totals, 2 * width, 0.0F);
  add_column_sums(totals, sizes.tokens, 2 * width, args.workspace, [=](int64_t token, float* sums) {
    for (int64_t head = 0; head < sizes.heads; ++head) {
      const int64_t at = head * sizes.size;
      const DecayGrads<T> grads{a + token * width + at, of_decay + token * width + at,
                                sizes.bias + at, -std::exp(sizes.log_decay[head]), sizes.size};
      grads.add(grad_a + token * width + at, sums + at, sums + width + at);
    }
  });
  return {totals, static_cast<size_t>(2 * width)};
}

void kda_gates_backward(const KdaGatesBackward& /*op*/, const Args<KdaGatesBackward>& args) {
  using Op = KdaGatesBackward;
  const auto sizes = GateSizes::of<Op>(args);
  const int64_t width = sizes.width();
  with_storage(args.in(Op::kB).dtype, [&](auto storage) {
    using T = decltype(storage);
    write_strength_grads<T>(args);
    const std::span<const float> totals = sum_decay_grads<T>(sizes, args);
    if (args.out(Op::kGradBias)) {
      float* to = args.out(Op::kGradBias).as<float>();
      for (int64_t i = 0; i < width; ++i) to[i] += totals[i];
    }
    if (args.out(Op::kGradLogDecay)) {
      float* to = args.out(Op::kGradLogDecay).as<float>();
      for (int64_t i = 0; i < width; ++i) to[i / sizes.size] += totals[width + i];
    }
  });
}

int64_t kda_gates_backward_workspace(const KdaGatesBackward& /*op*/,
                                     std::span<const ValueType> inputs) {
  const int64_t cols = 2 * inputs[KdaGatesBackward::kA].shape[1];
  return column_sums_bytes(cols) + cols * static_cast<int64_t>(sizeof(float));
}

}  // namespace

TESSERA_CPU_KERNELS(add_kda_gates_cpu, table) {
  add_kernel<KdaGates>(table, kda_gates);
  add_kernel<KdaGatesBackward>(table, kda_gates_backward,
                               {.workspace = kda_gates_backward_workspace});
}

}  // namespace tessera
