#include <cmath>

#include "ops/column_sums.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using simd::load;
using simd::store;
using simd::Vec;

template <typename T>
float sum_of_squares(const T* x, int64_t hidden) {
  Vec sums{};
  simd::for_each_vector(hidden, [&](int64_t i, auto lanes) {
    const Vec v = load(x + i, lanes);
    sums += v * v;
  });
  return simd::sum(sums);
}

template <typename T>
void scale_row(T* y, const T* x, const float* weight, float rstd, int64_t hidden) {
  simd::for_each_vector(hidden, [=](int64_t i, auto lanes) {
    store(y + i, load(x + i, lanes) * rstd * load(weight + i, lanes), lanes);
  });
}

void rmsnorm(const Operator& op, const KernelArgs& args) {
  const float eps = static_cast<const RmsNorm&>(op).eps();
  const Tensor& x = args.in(0);
  const int64_t hidden = args.in(1).shape[0];
  const int64_t rows = x.num_elements() / hidden;
  const float* weight = args.in(1).as<float>();
  float* rstd = args.out(1).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(0).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const T* x_H = from + row * hidden;
      const float mean = sum_of_squares(x_H, hidden) / static_cast<float>(hidden);
      rstd[row] = 1.0F / std::sqrt(mean + eps);
      scale_row(to + row * hidden, x_H, weight, rstd[row], hidden);
    }
  });
}

/// With n = x · rstd and g = grad · weight: grad of x = rstd · (g - n · mean(g · n)), and the
/// weight's gradient is the sum of grad · n over rows.
template <typename T>
struct BackwardRow {
  const T* x;
  const T* grad;
  const T* addend;  ///< or null
  const float* weight;
  float rstd;
  int64_t hidden;

  /// Adds the row's weight gradients to `sums`; returns mean(g · n).
  float add_weight_grads(float* sums) const {
    Vec dots{};
    simd::for_each_vector(hidden, [&, this](int64_t i, auto lanes) {
      const Vec term = load(grad + i, lanes) * (load(x + i, lanes) * rstd);
      dots += term * load(weight + i, lanes);
      store(sums + i, load(sums + i, lanes) + term, lanes);
    });
    return simd::sum(dots) / static_cast<float>(hidden);
  }

  void write_grad(T* grad_x, float mean) const {
    simd::for_each_vector(hidden, [=, this](int64_t i, auto lanes) {
      const Vec g = load(grad + i, lanes) * load(weight + i, lanes);
      const Vec n = load(x + i, lanes) * rstd;
      const Vec own = rstd * (g - n * mean);
      store(grad_x + i, addend == nullptr ? own : load(addend + i, lanes) + own, lanes);
    });
  }
};

void rmsnorm_backward(const Operator& op, const KernelArgs& args) {
  const bool has_addend = static_cast<const RmsNormBackward&>(op).addend();
  const Tensor& x = args.in(0);
  const int64_t hidden = args.in(1).shape[0];
  const float* weight = args.in(1).as<float>();
  const float* rstd = args.in(2).as<float>();
  float* accumulator = args.out(1) ? args.out(1).as<float>() : nullptr;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* x_rows = x.as<T>();
    const T* grad_rows = args.in(3).as<T>();
    const T* addend_rows = has_addend ? args.in(4).as<T>() : nullptr;
    T* grad_x = args.out(0).as<T>();
    add_column_sums(accumulator, x.num_elements() / hidden, hidden, args.workspace,
                    [=](int64_t row, float* sums) {
                      const int64_t at = row * hidden;
                      const T* addend = addend_rows == nullptr ? nullptr : addend_rows + at;
                      const BackwardRow<T> terms{x_rows + at, grad_rows + at, addend,
                                                 weight,      rstd[row],      hidden};
                      terms.write_grad(grad_x + at, terms.add_weight_grads(sums));
                    });
  });
}

}  // namespace

void add_rmsnorm_cpu(KernelTable& table) {
  table["rmsnorm"] = rmsnorm;
  table["rmsnorm_backward"] = rmsnorm_backward;
}

}  // namespace tessera
