#include <cmath>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rmsnorm/rmsnorm_rows.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void rmsnorm(const RmsNorm& op, const Args<RmsNorm>& args) {
  const float eps = op.eps();
  const Tensor& x = args.in(RmsNorm::kX);
  const int64_t hidden = args.in(RmsNorm::kWeight).shape[0];
  const int64_t rows = x.num_elements() / hidden;
  const float* weight = args.in(RmsNorm::kWeight).as<float>();
  float* rstd = args.out(RmsNorm::kRstd).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(RmsNorm::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const T* x_H = from + row * hidden;
      const float mean = sum_of_squares(x_H, hidden) / static_cast<float>(hidden);
      rstd[row] = 1.0F / std::sqrt(mean + eps);
      scale_row(to + row * hidden, x_H, weight, rstd[row], hidden);
    }
  });
}

void rmsnorm_backward(const RmsNormBackward& op, const Args<RmsNormBackward>& args) {
  using Op = RmsNormBackward;
  const bool has_addend = op.addend();
  const Tensor& x = args.in(Op::kX);
  const int64_t hidden = args.in(Op::kWeight).shape[0];
  const float* weight = args.in(Op::kWeight).as<float>();
  const float* rstd = args.in(Op::kForwardRstd).as<float>();
  float* accumulator = args.out(Op::kGradWeight) ? args.out(Op::kGradWeight).as<float>() : nullptr;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* x_rows = x.as<T>();
    const T* grad_rows = args.in(Op::kGrad).as<T>();
    const T* addend_rows = has_addend ? args.in(Op::kAddend).as<T>() : nullptr;
    T* grad_x = args.out(Op::kGradX).as<T>();
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

int64_t rmsnorm_backward_workspace(const RmsNormBackward& /*op*/,
                                   std::span<const ValueType> inputs) {
  return column_sums_bytes(inputs[RmsNormBackward::kWeight].shape[0]);
}

}  // namespace

TESSERA_CPU_KERNELS(add_rmsnorm_cpu, table) {
  add_kernel<RmsNorm>(table, rmsnorm);
  add_kernel<RmsNormBackward>(table, rmsnorm_backward, {.workspace = rmsnorm_backward_workspace});
}

}  // namespace tessera
