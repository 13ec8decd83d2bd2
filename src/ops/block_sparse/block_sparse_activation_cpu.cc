#include "ops/activation_math.h"
#include "ops/block_sparse/block_sparse_activation.h"
#include "ops/cpu_dispatch.h"
#include "ops/simd.h"

namespace tessera {
namespace {

using simd::Vec;

/// out = prob · f(gate) [· up], for one row of `width` values.
template <bool kGated, typename Function, typename T>
void activate_row(Function function, const T* pre, float prob, int64_t width, T* out) {
  simd::for_each_vector(width, [=](int64_t i, auto lanes) {
    Vec value = prob * function.value(simd::load(pre + i, lanes));
    if constexpr (kGated) value *= function.other(simd::load(pre + width + i, lanes));
    simd::store(out + i, value, lanes);
  });
}

/// The gradients of one row; returns that of its probability.
template <bool kGated, typename Function, typename T>
float activate_row_backward(Function function, const T* grad, const T* pre, float prob,
                            int64_t width, T* grad_pre) {
  Vec total{};
  simd::for_each_vector(width, [&](int64_t i, auto lanes) {
    const Vec g = simd::load(grad + i, lanes);
    const Slope slope = function.slope(simd::load(pre + i, lanes));
    Vec slope_grad = g * prob;
    Vec g_value = g * slope.value;
    if constexpr (kGated) {
      const Vec up = simd::load(pre + width + i, lanes);
      const Vec other = function.other(up);
      simd::store(grad_pre + width + i, function.other_grad(up, g_value * prob), lanes);
      slope_grad *= other;
      g_value *= other;
    }
    simd::store(grad_pre + i, slope_grad * slope.derivative, lanes);
    total += g_value;
  });
  return simd::sum(total);
}

/// The rows of sparse values: row r is values[start(r)] and its width, the blocks of its block-row
/// side by side.
struct SparseRows {
  std::span<const int32_t> row_offsets;
  int64_t block_size = 0;

  int64_t width(int64_t row) const {
    const size_t block_row = row / block_size;
    return (row_offsets[block_row + 1] - row_offsets[block_row]) * block_size;
  }
  int64_t start(int64_t row) const {
    const int64_t block_row = row / block_size;
    const int64_t panel = row_offsets[block_row] * block_size * block_size;
    return panel + row % block_size * width(row);
  }
};

SparseRows sparse_rows(const BlockSparseActivationSpec& spec, const Tensor& row_offsets,
                       int64_t num_rows) {
  ensure(num_rows % spec.block_size == 0 && num_rows / spec.block_size < row_offsets.num_elements(),
         "{} rows do not fit a topology of {} block-rows of {}", num_rows,
         row_offsets.num_elements() - 1, spec.block_size);
  return {row_offsets.span<int32_t>(), spec.block_size};
}

template <bool kGated, typename T, typename Function>
void forward(Function function, const BlockSparseActivationSpec& spec,
             const Args<BlockSparseActivation>& args) {
  using Op = BlockSparseActivation;
  const T* pre = args.in(Op::kPre).as<T>();
  const float* probs = args.in(Op::kProbs).as<float>();
  T* out = args.out(Op::kOut).as<T>();
  const int64_t num_rows = args.in(Op::kProbs).num_elements();
  const SparseRows rows = sparse_rows(spec, args.in(Op::kRowOffsets), num_rows);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t start = rows.start(row);
    activate_row<kGated>(function, pre + (kGated ? 2 : 1) * start, probs[row], rows.width(row),
                         out + start);
  }
}

template <bool kGated, typename T, typename Function>
void backward(Function function, const BlockSparseActivationSpec& spec,
              const Args<BlockSparseActivationBackward>& args) {
  using Op = BlockSparseActivationBackward;
  const T* grad = args.in(Op::kGrad).as<T>();
  const T* pre = args.in(Op::kPre).as<T>();
  const float* probs = args.in(Op::kProbs).as<float>();
  T* grad_pre = args.out(Op::kGradPre).as<T>();
  float* grad_probs = args.out(Op::kGradProbs).as<float>();
  const int64_t num_rows = args.in(Op::kProbs).num_elements();
  const SparseRows rows = sparse_rows(spec, args.in(Op::kRowOffsets), num_rows);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t start = rows.start(row);
    const int64_t pre_start = (kGated ? 2 : 1) * start;
    grad_probs[row] = activate_row_backward<kGated>(
        function, grad + start, pre + pre_start, probs[row], rows.width(row), grad_pre + pre_start);
  }
}

/// Calls run.operator()<gated, T>(function).
template <typename Run>
void dispatch(const ActivationFunction& activation, DType dtype, Run run) {
  with_activation(activation, [&](auto function) {
    const bool gated = is_gated(activation.kind);
    if (dtype == DType::kF32) {
      gated ? run.template operator()<true, float>(function)
            : run.template operator()<false, float>(function);
    } else {
      gated ? run.template operator()<true, Bf16>(function)
            : run.template operator()<false, Bf16>(function);
    }
  });
}

void forward_kernel(const BlockSparseActivation& op, const Args<BlockSparseActivation>& args) {
  const BlockSparseActivationSpec& spec = op.spec();
  dispatch(
      spec.activation, args.in(BlockSparseActivation::kPre).dtype,
      [&]<bool kGated, typename T>(auto function) { forward<kGated, T>(function, spec, args); });
}

void backward_kernel(const BlockSparseActivationBackward& op,
                     const Args<BlockSparseActivationBackward>& args) {
  const BlockSparseActivationSpec& spec = op.spec();
  dispatch(
      spec.activation, args.in(BlockSparseActivationBackward::kGrad).dtype,
      [&]<bool kGated, typename T>(auto function) { backward<kGated, T>(function, spec, args); });
}

}  // namespace

TESSERA_CPU_KERNELS(add_block_sparse_activation_cpu, table) {
  add_kernel<BlockSparseActivation>(table, forward_kernel);
  add_kernel<BlockSparseActivationBackward>(table, backward_kernel);
}

}  // namespace tessera
