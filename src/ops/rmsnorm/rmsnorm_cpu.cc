#include <cmath>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rmsnorm/rmsnorm_rows.h"
#include "ops/storage.h"

namespace tessera {
namespace {

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
                      const NormBackwardRow<T> terms{x_rows + at, grad_rows + at, addend,
                                                     weight,      rstd[row],      hidden};
                      terms.write_grad(grad_x + at, terms.add_weight_grads(sums));
                    });
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_rmsnorm_cpu, table) {
  table["rmsnorm"] = rmsnorm;
  table["rmsnorm_backward"] = rmsnorm_backward;
}

}  // namespace tessera
