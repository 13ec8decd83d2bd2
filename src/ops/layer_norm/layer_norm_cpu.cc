#include <cmath>

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
      const float mean = find_mean(from, size);
      const float rstd = 1.0F / std::sqrt(find_variance(from, size, mean) + op.eps());
      simd::for_each_vector(size, [=](int64_t i, auto lanes) {
        const Vec normed = (simd::load(from + i, lanes) - mean) * rstd;
        simd::store(to + i, normed * simd::load(weight + i, lanes) + simd::load(bias + i, lanes),
                    lanes);
      });
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_layer_norm_cpu, table) {
  add_kernel<LayerNorm>(table, layer_norm);
}

}  // namespace tessera
