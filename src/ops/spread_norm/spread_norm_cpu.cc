#include <cmath>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/spread_norm/spread_norm.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using simd::load;
using simd::store;
using simd::Vec;

float rstd_of(const SpreadNormSpec& spec, float square_sum) {
  const float mean = square_sum / static_cast<float>(spec.num_elements);
  return 1.0F / std::sqrt(mean + static_cast<float>(spec.eps));
}

void square_sums(const SquareSums& /*op*/, const Args<SquareSums>& args) {
  const Tensor& x = args.in(SquareSums::kX);
  const int64_t width = x.shape[1];
  float* sums = args.out(SquareSums::kSums).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    const auto* rows = x.as<decltype(storage)>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.shape[0]; ++row) {
      Vec sum{};
      simd::for_each_vector(width, [&](int64_t i, auto lanes) {
        const Vec v = load(rows + row * width + i, lanes);
        sum += v * v;
      });
      sums[row] = simd::sum(sum);
    }
  });
}

void square_sums_backward(const SquareSumsBackward& /*op*/, const Args<SquareSumsBackward>& args) {
  using Op = SquareSumsBackward;
  const Tensor& x = args.in(Op::kX);
  const int64_t width = x.shape[1];
  const float* grad = args.in(Op::kGrad).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(Op::kGradX).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.shape[0]; ++row) {
      const int64_t at = row * width;
      const float factor = 2.0F * grad[row];
      simd::for_each_vector(width, [=](int64_t i, auto lanes) {
        store(to + at + i, load(from + at + i, lanes) * factor, lanes);
      });
    }
  });
}

void spread_norm(const SpreadNorm& op, const Args<SpreadNorm>& args) {
  using Op = SpreadNorm;
  const SpreadNormSpec& spec = op.spec();
  const Tensor& x = args.in(Op::kX);
  const int64_t width = x.shape[1];
  const float* weight = args.in(Op::kWeight).as<float>();
  const float* sums = args.in(Op::kSquareSums).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(Op::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.shape[0]; ++row) {
      const int64_t at = row * width;
      const float rstd = rstd_of(spec, sums[row]);
      simd::for_each_vector(width, [=](int64_t i, auto lanes) {
        store(to + at + i, load(from + at + i, lanes) * rstd * load(weight + i, lanes), lanes);
      });
    }
  });
}

/// One row: grad of x = grad · weight · rstd, of weight grad · x · rstd, and of the square sum
/// Σ grad · weight · x times the derivative of rstd, -rstd³ / (2 · num_elements).
template <typename T>
struct BackwardRow {
  const T* x;
  const T* grad;
  const float* weight;
  float rstd;
  int64_t width;

  /// Writes the gradient of x and adds the weight's to `sums`; returns Σ grad · weight · x · rstd.
  float write(T* grad_x, float* sums) const {
    Vec dots{};
    simd::for_each_vector(width, [&, this](int64_t i, auto lanes) {
      const Vec scaled = load(grad + i, lanes) * rstd;
      const Vec value = load(x + i, lanes);
      dots += scaled * value * load(weight + i, lanes);
      store(sums + i, load(sums + i, lanes) + scaled * value, lanes);
      store(grad_x + i, scaled * load(weight + i, lanes), lanes);
    });
    return simd::sum(dots);
  }
};

void spread_norm_backward(const SpreadNormBackward& op, const Args<SpreadNormBackward>& args) {
  using Op = SpreadNormBackward;
  const SpreadNormSpec& spec = op.spec();
  const Tensor& x = args.in(Op::kX);
  const int64_t width = x.shape[1];
  const float* weight = args.in(Op::kWeight).as<float>();
  const float* square_sum = args.in(Op::kSquareSums).as<float>();
  float* grad_sum = args.out(Op::kGradSquareSums).as<float>();
  float* accumulator = args.out(Op::kGradWeight) ? args.out(Op::kGradWeight).as<float>() : nullptr;
  const float share = -0.5F / static_cast<float>(spec.num_elements);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* x_rows = x.as<T>();
    const T* grad_rows = args.in(Op::kGrad).as<T>();
    T* grad_x = args.out(Op::kGradX).as<T>();
    add_column_sums(accumulator, x.shape[0], width, args.workspace, [=](int64_t row, float* sums) {
      const int64_t at = row * width;
      const float rstd = rstd_of(spec, square_sum[row]);
      const BackwardRow<T> terms{x_rows + at, grad_rows + at, weight, rstd, width};
      grad_sum[row] = share * rstd * rstd * terms.write(grad_x + at, sums);
    });
  });
}

int64_t spread_norm_backward_workspace(const SpreadNormBackward& /*op*/,
                                       std::span<const ValueType> inputs) {
  return column_sums_bytes(inputs[SpreadNormBackward::kWeight].shape[0]);
}

}  // namespace

TESSERA_CPU_KERNELS(add_spread_norm_cpu, table) {
  add_kernel<SquareSums>(table, square_sums);
  add_kernel<SquareSumsBackward>(table, square_sums_backward);
  add_kernel<SpreadNorm>(table, spread_norm);
  add_kernel<SpreadNormBackward>(table, spread_norm_backward,
                                 {.workspace = spread_norm_backward_workspace});
}

}  // namespace tessera
