#include <cmath>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/norm_rope/norm_rope.h"
#include "ops/rmsnorm/rmsnorm_rows.h"
#include "ops/rope/rope_heads.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// A head between the norm and the rotation.
using HeadRow = std::array<float, NormRope::kMaxHeadSize>;

void norm_rope(const NormRope& op, const Args<NormRope>& args) {
  const RotarySpec& spec = op.spec();
  const Tensor& x = args.in(NormRope::kX);
  const float* weight = args.in(NormRope::kWeight).as<float>();
  const int32_t* positions = args.in(NormRope::kPositions).as<int32_t>();
  float* rstd = args.out(NormRope::kRstd).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(NormRope::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < x.shape[0]; ++t) {
      TokenAngles angles;
      HeadRow normed;
      angles.fill(spec, positions[t], false);
      for (int64_t head = t * spec.num_heads; head < (t + 1) * spec.num_heads; ++head) {
        const T* x_D = from + head * spec.head_size;
        const float mean = sum_of_squares(x_D, spec.head_size) / static_cast<float>(spec.head_size);
        rstd[head] = 1.0F / std::sqrt(mean + op.eps());
        scale_row(normed.data(), x_D, weight, rstd[head], spec.head_size);
        rotate_head(to + head * spec.head_size, normed.data(), angles, spec);
      }
    }
  });
}

void norm_rope_backward(const NormRopeBackward& op, const Args<NormRopeBackward>& args) {
  using Op = NormRopeBackward;
  const RotarySpec& spec = op.spec();
  const Tensor& x = args.in(Op::kX);
  const float* weight = args.in(Op::kWeight).as<float>();
  const int32_t* positions = args.in(Op::kPositions).as<int32_t>();
  const float* rstd = args.in(Op::kRstd).as<float>();
  float* accumulator = args.out(Op::kGradWeight) ? args.out(Op::kGradWeight).as<float>() : nullptr;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* x_rows = x.as<T>();
    const T* grad_rows = args.in(Op::kGrad).as<T>();
    T* grad_x = args.out(Op::kGradX).as<T>();
    const auto add_token = [&](int64_t t, float* sums) {
      TokenAngles angles;
      HeadRow turned_back;
      angles.fill(spec, positions[t], true);
      for (int64_t head = t * spec.num_heads; head < (t + 1) * spec.num_heads; ++head) {
        const int64_t at = head * spec.head_size;
        rotate_head(turned_back.data(), grad_rows + at, angles, spec);
        const NormBackwardRow<T, float> terms{.x = x_rows + at,
                                              .grad = turned_back.data(),
                                              .addend = nullptr,
                                              .weight = weight,
                                              .rstd = rstd[head],
                                              .hidden = spec.head_size};
        terms.write_grad(grad_x + at, terms.add_weight_grads(sums));
      }
    };
    add_column_sums(accumulator, x.shape[0], spec.head_size, args.workspace, add_token);
  });
}

int64_t norm_rope_backward_workspace(const NormRopeBackward& /*op*/,
                                     std::span<const ValueType> inputs) {
  return column_sums_bytes(inputs[NormRopeBackward::kWeight].shape[0]);
}

}  // namespace

TESSERA_CPU_KERNELS(add_norm_rope_cpu, table) {
  add_kernel<NormRope>(table, norm_rope);
  add_kernel<NormRopeBackward>(table, norm_rope_backward,
                               {.workspace = norm_rope_backward_workspace});
}

}  // namespace tessera
