#include <algorithm>
#include <functional>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using Extra = Linear::Extra;

/// x · weightᵀ, without a place for the result.
Gemm forward_product(const Tensor& x, const Tensor& weight) {
  const int64_t in = weight.shape[1];
  return {.transpose_b = true,
          .m = x.shape[0],
          .n = weight.shape[0],
          .k = in,
          .a = x.data,
          .lda = in,
          .b = weight.data,
          .ldb = in,
          .ldc = weight.shape[0],
          .input_type = x.dtype,
          .output_type = x.dtype};
}

/// Some rows of what the product is added to, in F32.
using FillRows = std::function<void(float* to, int64_t begin, int64_t end)>;

/// The same bias for all rows.
FillRows rows_of_bias(const Tensor& bias) {
  return [bias](float* to, int64_t begin, int64_t end) {
    const int64_t cols = bias.num_elements();
#pragma omp parallel for schedule(static)
    for (int64_t row = begin; row < end; ++row)
      std::copy_n(bias.as<float>(), cols, to + (row - begin) * cols);
  };
}

FillRows rows_of_addend(const Tensor& addend) {
  return [addend](float* to, int64_t begin, int64_t end) {
    const int64_t cols = addend.shape[1];
    with_storage(addend.dtype, [&](auto storage) {
      const auto* from = addend.as<decltype(storage)>();
#pragma omp parallel for schedule(static)
      for (int64_t row = begin; row < end; ++row)
        simd::convert(to + (row - begin) * cols, from + row * cols, cols);
    });
  };
}

/// Rows of `out` = what `fill` gives + the product, rounded once: a BF16 result by way of `tile`.
void add_product(Gemm product, const Tensor& out, float* tile, const FillRows& fill) {
  const int64_t rows = product.m;
  const int64_t cols = product.n;
  const bool is_f32 = out.dtype == DType::kF32;
  const int64_t step = is_f32 ? std::max<int64_t>(rows, 1) : kLinearTileRows;
  const auto* a = static_cast<const std::byte*>(product.a);
  product.output_type = DType::kF32;
  product.accumulate = true;
  product.c = is_f32 ? out.as<float>() : tile;
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(rows, begin + step);
    product.m = end - begin;
    product.a = a + begin * product.lda * dtype_size(product.input_type);
    fill(static_cast<float*>(product.c), begin, end);
    gemm(product);
    if (is_f32) continue;
#pragma omp parallel for schedule(static)
    for (int64_t row = begin; row < end; ++row)
      simd::convert(out.as<Bf16>() + row * cols, tile + (row - begin) * cols, cols);
  }
}

void run_product(Gemm product, const KernelArgs& args, const FillRows& fill) {
  if (fill) {
    add_product(product, args.out(0), reinterpret_cast<float*>(args.workspace.data()), fill);
  } else {
    product.c = args.out(0).data;
    gemm(product);
  }
}

void linear(const Operator& op, const KernelArgs& args) {
  const Extra extra = static_cast<const Linear&>(op).extra();
  FillRows fill;
  if (extra == Extra::kBias) fill = rows_of_bias(args.in(2));
  if (extra == Extra::kAddend) fill = rows_of_addend(args.in(2));
  run_product(forward_product(args.in(0), args.in(1)), args, fill);
}

void linear_dgrad(const Operator& op, const KernelArgs& args) {
  const Tensor& grad = args.in(0);
  const Tensor& weight = args.in(1);
  const bool addend = static_cast<const LinearDgrad&>(op).addend();
  run_product({.m = grad.shape[0],
               .n = weight.shape[1],
               .k = weight.shape[0],
               .a = grad.data,
               .lda = grad.shape[1],
               .b = weight.data,
               .ldb = weight.shape[1],
               .ldc = weight.shape[1],
               .input_type = grad.dtype,
               .output_type = grad.dtype},
              args, addend ? rows_of_addend(args.in(2)) : FillRows());
}

void linear_wgrad(const Operator& /*op*/, const KernelArgs& args) {
  if (!args.out(0)) return;
  const Tensor& x = args.in(0);
  const Tensor& grad = args.in(1);
  gemm({.transpose_a = true,
        .m = grad.shape[1],
        .n = x.shape[1],
        .k = x.shape[0],
        .a = grad.data,
        .lda = grad.shape[1],
        .b = x.data,
        .ldb = x.shape[1],
        .c = args.out(0).data,
        .ldc = x.shape[1],
        .input_type = x.dtype,
        .output_type = DType::kF32,
        .accumulate = !args.set_accumulators});
}

void linear_bias_grad(const Operator& /*op*/, const KernelArgs& args) {
  if (args.out(0)) add_columns_of(args.in(0), args.out(0).as<float>(), args.workspace);
}

}  // namespace

TESSERA_CPU_KERNELS(add_linear_cpu, table) {
  table["linear"] = linear;
  table["linear_dgrad"] = linear_dgrad;
  table["linear_wgrad"] = Kernel(linear_wgrad).setting_accumulators();
  table["linear_bias_grad"] = linear_bias_grad;
}

}  // namespace tessera
