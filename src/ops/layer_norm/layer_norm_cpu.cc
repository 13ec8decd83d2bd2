#include <algorithm>
#include <cmath>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using simd::Vec;

template <typename T>
float find_mean(const T* x, int64_t size) {
  Vec sum{};
  simd::for_each_vector(size, [&](int64_t i, auto lanes) { sum += simd::load(x + i, lanes); });
  return simd::sum(sum) / static_cast<float>(size);
}

/// The sum of squares about the mean. Lanes behind the row's end would count the mean, so the last
/// elements are added one by one.
template <typename T>
float find_variance(const T* x, int64_t size, float mean) {
  Vec sum{};
  int64_t i = 0;
  for (; i + simd::kLanes <= size; i += simd::kLanes) {
    const Vec d = simd::load(x + i) - mean;
    sum += d * d;
  }
  float total = simd::sum(sum);
  for (; i < size; ++i) {
    const float d = static_cast<float>(x[i]) - mean;
    total += d * d;
  }
  return total / static_cast<float>(size);
}

struct RowStatistics {
  float mean;
  float rstd;
};

template <typename T>
RowStatistics find_statistics(const T* x, int64_t size, float eps) {
  const float mean = find_mean(x, size);
  return {mean, 1.0F / std::sqrt(find_variance(x, size, mean) + eps)};
}

void layer_norm(const LayerNorm& op, const Args<LayerNorm>& args) {
  const Tensor& x = args.in(LayerNorm::kX);
  const float* weight = args.in(LayerNorm::kWeight).as<float>();
  const float* bias = args.in(LayerNorm::kBias).as<float>();
  const int64_t size = x.shape[1];
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    T* y = args.out(LayerNorm::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.shape[0]; ++row) {
      const T* from = x.as<T>() + row * size;
      T* to = y + row * size;
      const RowStatistics of_row = find_statistics(from, size, op.eps());
      simd::for_each_vector(size, [=](int64_t i, auto lanes) {
        const Vec normed = (simd::load(from + i, lanes) - of_row.mean) * of_row.rstd;
        simd::store(to + i, normed * simd::load(weight + i, lanes) + simd::load(bias + i, lanes),
                    lanes);
      });
    }
  });
}

/// With n = (x - mean) · rstd and g = grad · weight: grad of x = rstd · (g - mean(g) - n · mean(g ·
/// n)); the weight's gradient is the sum of grad · n over rows, the bias's that of grad.
template <typename T>
struct BackwardRow {
  const T* x;
  const T* grad;
  const T* addend;  ///< or null
  const float* weight;
  RowStatistics of_row;
  int64_t size;

  struct Means {
    float grad;       ///< mean(g)
    float projected;  ///< mean(g · n)
  };

  /// `sums` has the weight's, then the bias's. What lies behind a row's end loads as 0.
  Means add_sums(float* sums) const {
    Vec of_grad{};
    Vec of_product{};
    simd::for_each_vector(size, [&, this](int64_t i, auto lanes) {
      const Vec own = simd::load(grad + i, lanes);
      const Vec term = own * (simd::load(x + i, lanes) - of_row.mean) * of_row.rstd;
      const Vec scale = simd::load(weight + i, lanes);
      of_grad += own * scale;
      of_product += term * scale;
      simd::store(sums + i, simd::load(sums + i, lanes) + term, lanes);
      simd::store(sums + size + i, simd::load(sums + size + i, lanes) + own, lanes);
    });
    const auto count = static_cast<float>(size);
    return {simd::sum(of_grad) / count, simd::sum(of_product) / count};
  }

  void write_grad(T* grad_x, Means means) const {
    simd::for_each_vector(size, [=, this](int64_t i, auto lanes) {
      const Vec g = simd::load(grad + i, lanes) * simd::load(weight + i, lanes);
      const Vec n = (simd::load(x + i, lanes) - of_row.mean) * of_row.rstd;
      const Vec own = of_row.rstd * (g - means.grad - n * means.projected);
      simd::store(grad_x + i, addend == nullptr ? own : simd::load(addend + i, lanes) + own, lanes);
    });
  }
};

/// Adds sums [size] to an accumulator, where there is one.
void add_to(const Tensor& accumulator, const float* sums, int64_t size) {
  if (!accumulator) return;
  float* const to = accumulator.as<float>();
  for (int64_t i = 0; i < size; ++i) to[i] += sums[i];
}

int64_t sums_bytes(int64_t size) {
  return 2 * size * static_cast<int64_t>(sizeof(float));
}

void layer_norm_backward(const LayerNormBackward& op, const Args<LayerNormBackward>& args) {
  using Op = LayerNormBackward;
  const Tensor& x = args.in(Op::kX);
  const int64_t size = x.shape[1];
  const float* weight = args.in(Op::kWeight).as<float>();
  auto* const totals = reinterpret_cast<float*>(args.workspace.data());
  std::fill_n(totals, 2 * size, 0.0F);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* x_rows = x.as<T>();
    const T* grad_rows = args.in(Op::kGrad).as<T>();
    const T* addend_rows = op.addend() ? args.in(Op::kAddend).as<T>() : nullptr;
    T* grad_x = args.out(Op::kGradX).as<T>();
    add_column_sums(totals, x.shape[0], 2 * size, args.workspace.subspan(sums_bytes(size)),
                    [=, eps = op.eps()](int64_t row, float* sums) {
                      const int64_t at = row * size;
                      const BackwardRow<T> terms{
                          x_rows + at,
                          grad_rows + at,
                          addend_rows == nullptr ? nullptr : addend_rows + at,
                          weight,
                          find_statistics(x_rows + at, size, eps),
                          size};
                      terms.write_grad(grad_x + at, terms.add_sums(sums));
                    });
  });
  add_to(args.out(Op::kGradWeight), totals, size);
  add_to(args.out(Op::kGradBias), totals + size, size);
}

int64_t layer_norm_backward_workspace(const LayerNormBackward& /*op*/,
                                      std::span<const ValueType> inputs) {
  const int64_t size = inputs[LayerNormBackward::kX].shape[1];
  return sums_bytes(size) + column_sums_bytes(2 * size);
}

}  // namespace

TESSERA_CPU_KERNELS(add_layer_norm_cpu, table) {
  add_kernel<LayerNorm>(table, layer_norm);
  add_kernel<LayerNormBackward>(table, layer_norm_backward,
                                {.workspace = layer_norm_backward_workspace});
}

}  // namespace tessera
