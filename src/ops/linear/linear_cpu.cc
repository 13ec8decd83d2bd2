#include <algorithm>

#include "ops/column_sums.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// x[begin, end) · weightᵀ into rows of `out`.
Gemm forward_product(const Tensor& x, const Tensor& weight, int64_t begin, int64_t end) {
  const int64_t in = weight.shape[1];
  return {.transpose_b = true,
          .m = end - begin,
          .n = weight.shape[0],
          .k = in,
          .a = static_cast<const std::byte*>(x.data) + begin * in * dtype_size(x.dtype),
          .lda = in,
          .b = weight.data,
          .ldb = in,
          .ldc = weight.shape[0],
          .input_type = x.dtype,
          .output_type = x.dtype};
}

void run_plain(const KernelArgs& args) {
  Gemm product = forward_product(args.in(0), args.in(1), 0, args.in(0).shape[0]);
  product.c = args.out(0).data;
  gemm(product);
}

/// Rows of `bias`, for a product to be accumulated into.
void fill_rows(float* rows_TO, std::span<const float> bias, int64_t rows) {
  const auto cols = static_cast<int64_t>(bias.size());
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(bias.data(), cols, rows_TO + row * cols);
  }
}

void add_product(const KernelArgs& args, int64_t begin, int64_t end, float* rows_TO) {
  fill_rows(rows_TO, args.in(2).span<float>(), end - begin);
  Gemm product = forward_product(args.in(0), args.in(1), begin, end);
  product.c = rows_TO;
  product.output_type = DType::kF32;
  product.accumulate = true;
  gemm(product);
}

void run_with_bias(const KernelArgs& args) {
  const Tensor& out = args.out(0);
  const int64_t rows = out.shape[0];
  const int64_t cols = out.shape[1];
  if (out.dtype == DType::kF32) return add_product(args, 0, rows, out.as<float>());
  auto* tile = reinterpret_cast<float*>(args.workspace.data());
  for (int64_t begin = 0; begin < rows; begin += kLinearBiasRows) {
    const int64_t end = std::min(rows, begin + kLinearBiasRows);
    add_product(args, begin, end, tile);
#pragma omp parallel for schedule(static)
    for (int64_t row = begin; row < end; ++row) {
      simd::convert(out.as<Bf16>() + row * cols, tile + (row - begin) * cols, cols);
    }
  }
}

void linear(const Operator& /*op*/, const KernelArgs& args) {
  if (args.inputs.size() == 3) {
    run_with_bias(args);
  } else {
    run_plain(args);
  }
}

void linear_dgrad(const Operator& /*op*/, const KernelArgs& args) {
  const Tensor& grad = args.in(0);
  const Tensor& weight = args.in(1);
  gemm({.m = grad.shape[0],
        .n = weight.shape[1],
        .k = weight.shape[0],
        .a = grad.data,
        .lda = grad.shape[1],
        .b = weight.data,
        .ldb = weight.shape[1],
        .c = args.out(0).data,
        .ldc = weight.shape[1],
        .input_type = grad.dtype,
        .output_type = grad.dtype});
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

void add_linear_cpu(KernelTable& table) {
  table["linear"] = linear;
  table["linear_dgrad"] = linear_dgrad;
  table["linear_wgrad"] = Kernel(linear_wgrad).setting_accumulators();
  table["linear_bias_grad"] = linear_bias_grad;
}

}  // namespace tessera
