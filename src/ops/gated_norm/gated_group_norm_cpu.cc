#include <cmath>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/gated_norm/gated_group_norm.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// One group of one token.
template <typename T>
struct GroupRow {
  const T* x;
  const T* z;
  const float* weight;
  int64_t size;
  float eps;

  template <typename Lanes>
  simd::Vec gated(int64_t i, Lanes lanes) const {
    const simd::Vec gate = simd::load(z + i, lanes);
    return simd::load(x + i, lanes) * (gate * simd::sigmoid(gate));
  }

  /// 1 / sqrt(mean of the gated elements' squares + eps).
  float inverse_deviation() const {
    simd::Vec squares{};
    simd::for_each_vector(size, [&](int64_t i, auto lanes) {
      const simd::Vec value = gated(i, lanes);
      squares += value * value;
    });
    return 1.0F / std::sqrt(simd::sum(squares) / static_cast<float>(size) + eps);
  }

  void write(T* y) const {
    const float rstd = inverse_deviation();
    simd::for_each_vector(size, [&](int64_t i, auto lanes) {
      simd::store(y + i, gated(i, lanes) * rstd * simd::load(weight + i, lanes), lanes);
    });
  }

  /// Writes the gradients of x and z, and adds the weight's.
  void write_grads(const T* grad, T* grad_x, T* grad_z, float* sums) const {
    const float rstd = inverse_deviation();
    simd::Vec dot{};
    simd::for_each_vector(size, [&](int64_t i, auto lanes) {
      const simd::Vec g = simd::load(grad + i, lanes);
      const simd::Vec value = gated(i, lanes);
      simd::store(sums + i, simd::load(sums + i, lanes) + g * value * rstd, lanes);
      dot += g * simd::load(weight + i, lanes) * value;
    });
    const float shift = simd::sum(dot) * rstd * rstd / static_cast<float>(size);
    simd::for_each_vector(size, [&](int64_t i, auto lanes) {
      const simd::Vec gate = simd::load(z + i, lanes);
      const simd::Vec share = simd::sigmoid(gate);
      const simd::Vec of_normed = simd::load(grad + i, lanes) * simd::load(weight + i, lanes);
      const simd::Vec of_gated = (of_normed - gated(i, lanes) * shift) * rstd;
      const simd::Vec slope = share * (1.0F + gate * (1.0F - share));
      const simd::Vec of_gate = of_gated * simd::load(x + i, lanes) * slope;
      simd::store(grad_x + i, of_gated * (gate * share), lanes);
      simd::store(grad_z + i, of_gate, lanes);
    });
  }
};

void gated_group_norm(const GatedGroupNorm& op, const Args<GatedGroupNorm>& args) {
  using Op = GatedGroupNorm;
  const Tensor& x = args.in(Op::kX);
  const int64_t groups = op.spec().num_groups;
  const int64_t size = x.shape[1] / groups;
  const int64_t rows = x.shape[0] * groups;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const GroupRow<T> first{.x = x.as<T>(),
                            .z = args.in(Op::kZ).as<T>(),
                            .weight = args.in(Op::kWeight).as<float>(),
                            .size = size,
                            .eps = static_cast<float>(op.spec().eps)};
    T* y = args.out(Op::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * size;
      const GroupRow<T> own{first.x + at, first.z + at, first.weight + row % groups * size, size,
                            first.eps};
      own.write(y + at);
    }
  });
}

void gated_group_norm_backward(const GatedGroupNormBackward& op,
                               const Args<GatedGroupNormBackward>& args) {
  using Op = GatedGroupNormBackward;
  const Tensor& x = args.in(Op::kX);
  const int64_t width = x.shape[1];
  const int64_t groups = op.spec().num_groups;
  const int64_t size = width / groups;
  const float* weight = args.in(Op::kWeight).as<float>();
  float* accumulator = args.out(Op::kGradWeight) ? args.out(Op::kGradWeight).as<float>() : nullptr;
  const auto eps = static_cast<float>(op.spec().eps);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    const T* gates = args.in(Op::kZ).as<T>();
    const T* grads = args.in(Op::kGrad).as<T>();
    T* grad_x = args.out(Op::kGradX).as<T>();
    T* grad_z = args.out(Op::kGradZ).as<T>();
    add_column_sums(accumulator, x.shape[0], width, args.workspace,
                    [=](int64_t token, float* sums) {
                      for (int64_t group = 0; group < groups; ++group) {
                        const int64_t column = group * size;
                        const int64_t at = token * width + column;
                        const GroupRow<T> row{from + at, gates + at, weight + column, size, eps};
                        row.write_grads(grads + at, grad_x + at, grad_z + at, sums + column);
                      }
                    });
  });
}

int64_t group_norm_workspace(const GatedGroupNormBackward& /*op*/,
                             std::span<const ValueType> inputs) {
  return column_sums_bytes(inputs[GatedGroupNormBackward::kWeight].shape[0]);
}

}  // namespace

TESSERA_CPU_KERNELS(add_gated_group_norm_cpu, table) {
  add_kernel<GatedGroupNorm>(table, gated_group_norm);
  add_kernel<GatedGroupNormBackward>(table, gated_group_norm_backward,
                                     {.workspace = group_norm_workspace});
}

}  // namespace tessera
