#include <cmath>

#include "ops/cpu_dispatch.h"
#include "ops/rmsnorm/rmsnorm_rows.h"
#include "ops/simd.h"
#include "ops/storage.h"
#include "ops/unit_norm/unit_norm.h"

namespace tessera {
namespace {

template <typename T>
float find_rstd(const T* x, int64_t size, float eps) {
  return 1.0F / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
}

void unit_norm(const UnitNorm& op, const Args<UnitNorm>& args) {
  const int64_t size = op.head_size();
  const Tensor& x = args.in(UnitNorm::kX);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(UnitNorm::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < x.num_elements() / size; ++head) {
      const T* own = from + head * size;
      T* own_y = to + head * size;
      const float rstd = find_rstd(own, size, op.eps());
      simd::for_each_vector(size, [=](int64_t i, auto lanes) {
        simd::store(own_y + i, simd::load(own + i, lanes) * rstd, lanes);
      });
    }
  });
}

/// With n = x · rstd: grad of x = rstd · (g - n · mean(g · n)).
template <typename T>
void write_head_grad(T* grad_x, const T* x, const T* grad, int64_t size, float eps) {
  const float rstd = find_rstd(x, size, eps);
  simd::Vec dots{};
  simd::for_each_vector(size, [&](int64_t i, auto lanes) {
    dots += simd::load(grad + i, lanes) * (simd::load(x + i, lanes) * rstd);
  });
  const float mean = simd::sum(dots) / static_cast<float>(size);
  simd::for_each_vector(size, [=](int64_t i, auto lanes) {
    const simd::Vec n = simd::load(x + i, lanes) * rstd;
    simd::store(grad_x + i, rstd * (simd::load(grad + i, lanes) - n * mean), lanes);
  });
}

void unit_norm_backward(const UnitNormBackward& op, const Args<UnitNormBackward>& args) {
  using Op = UnitNormBackward;
  const int64_t size = op.head_size();
  const Tensor& x = args.in(Op::kX);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    const T* grad = args.in(Op::kGrad).as<T>();
    T* grad_x = args.out(Op::kGradX).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < x.num_elements() / size; ++head)
      write_head_grad(grad_x + head * size, from + head * size, grad + head * size, size, op.eps());
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_unit_norm_cpu, table) {
  add_kernel<UnitNorm>(table, unit_norm);
  add_kernel<UnitNormBackward>(table, unit_norm_backward);
}

}  // namespace tessera
