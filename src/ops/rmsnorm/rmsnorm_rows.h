#pragma once

#include "ops/simd.h"

/// The norm of single rows on the CPU.
namespace tessera {

template <typename T>
float sum_of_squares(const T* x, int64_t hidden) {
  simd::Vec sums{};
  simd::for_each_vector(hidden, [&](int64_t i, auto lanes) {
    const simd::Vec v = simd::load(x + i, lanes);
    sums += v * v;
  });
  return simd::sum(sums);
}

/// y = x · rstd · weight.
template <typename To, typename From>
void scale_row(To* y, const From* x, const float* weight, float rstd, int64_t hidden) {
  simd::for_each_vector(hidden, [=](int64_t i, auto lanes) {
    simd::store(y + i, simd::load(x + i, lanes) * rstd * simd::load(weight + i, lanes), lanes);
  });
}

/// With n = x · rstd and g = grad · weight: grad of x = rstd · (g - n · mean(g · n)), and the
/// weight's gradient is the sum of grad · n over rows.
template <typename T, typename Grad = T>
struct NormBackwardRow {
  const T* x;
  const Grad* grad;
  const T* addend;  ///< or null
  const float* weight;
  float rstd;
  int64_t hidden;

  /// Adds the row's weight gradients to `sums`; returns mean(g · n).
  float add_weight_grads(float* sums) const {
    simd::Vec dots{};
    simd::for_each_vector(hidden, [&, this](int64_t i, auto lanes) {
      const simd::Vec term = simd::load(grad + i, lanes) * (simd::load(x + i, lanes) * rstd);
      dots += term * simd::load(weight + i, lanes);
      simd::store(sums + i, simd::load(sums + i, lanes) + term, lanes);
    });
    return simd::sum(dots) / static_cast<float>(hidden);
  }

  void write_grad(T* grad_x, float mean) const {
    simd::for_each_vector(hidden, [=, this](int64_t i, auto lanes) {
      const simd::Vec g = simd::load(grad + i, lanes) * simd::load(weight + i, lanes);
      const simd::Vec n = simd::load(x + i, lanes) * rstd;
      const simd::Vec own = rstd * (g - n * mean);
      simd::store(grad_x + i, addend == nullptr ? own : simd::load(addend + i, lanes) + own, lanes);
    });
  }
};

}  // namespace tessera
