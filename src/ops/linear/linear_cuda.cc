#include <algorithm>

#include "ops/cuda/matrix_product.h"
#include "ops/grouped_matmul/grouped_matmul_cuda.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_kernels.h"

namespace tessera {
namespace {

using cuda::context_of;
using cuda::multiply;
using cuda::stream_of;

/// Rows of a BF16 result with bias that are made at a time in F32: cuBLASLt has no such product
/// with an F32 bias. Enough for a product that fills the GPU.
int64_t rows_before_bias(int64_t num_columns) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  constexpr int64_t kUnit = 128;  // rows of a product's tile
  const int64_t row_bytes = static_cast<int64_t>(sizeof(float)) * std::max<int64_t>(num_columns, 1);
  return std::max(kBytes / row_bytes / kUnit, int64_t{1}) * kUnit;
}

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

/// The blocks of a single expert that holds all of a weight [rows, columns], whose tokens are the
/// rows up to the extent: products of ragged rows do no more work than there are rows.
cuda::ExpertBlocks single_expert(const KernelArgs& args, int64_t rows, int64_t columns,
                                 const int64_t* extent) {
  auto* const offsets = reinterpret_cast<int64_t*>(args.workspace.data());
  cuda::launch_row_range(extent, offsets, stream_of(args));
  const ExpertSizes sizes({rows}, "linear");
  cuda::ExpertBlocks blocks = context_of(args).get<cuda::ExpertTables>().blocks(sizes, columns);
  blocks.offsets = offsets;
  return blocks;
}

void multiply_ragged(const KernelArgs& args, bool by_out) {
  const Tensor& rows = args.in(0);
  const Tensor& weight = args.in(1);
  cuda::grouped_rows(
      {.experts = single_expert(args, weight.shape[0], weight.shape[1], args.in_extent(0)),
       .dtype = rows.dtype,
       .by_out = by_out,
       .num_rows = rows.shape[0],
       .a = rows.data,
       .weight = weight.data,
       .y = args.out(0).data},
      stream_of(args));
}

bool is_ragged(const KernelArgs& args) {
  return args.in_extent(0) != nullptr;
}

/// Rows beyond the extent of ragged ones are multiplied too: each gives a row of the result that
/// nobody reads.
void run_with_bias(const KernelArgs& args) {
  Gemm product = forward_product(args.in(0), args.in(1));
  const Tensor& out = args.out(0);
  const auto* bias = args.in(2).as<float>();
  const bool bf16 = out.dtype == DType::kBF16;
  auto* const sums = bf16 ? reinterpret_cast<float*>(args.workspace.data()) : out.as<float>();
  const int64_t rows = product.m;
  const int64_t step = bf16 ? rows_before_bias(product.n) : std::max<int64_t>(rows, 1);
  product.output_type = DType::kF32;
  product.c = sums;
  for (int64_t first = 0; first < rows; first += step) {
    product.m = std::min(step, rows - first);
    multiply(args, product);
    cuda::launch_add_bias(
        sums, bias, static_cast<std::byte*>(out.data) + first * product.n * dtype_size(out.dtype),
        bf16, product.m, product.n, stream_of(args));
    product.a = static_cast<const std::byte*>(product.a) +
                product.m * product.k * dtype_size(product.input_type);
  }
}

void linear(const Operator& /*op*/, const KernelArgs& args) {
  if (args.inputs.size() == 3) return run_with_bias(args);
  if (is_ragged(args) && args.in(1).num_elements() > 0) return multiply_ragged(args, true);
  Gemm product = forward_product(args.in(0), args.in(1));
  product.c = args.out(0).data;
  multiply(args, product);
}

void linear_dgrad(const Operator& /*op*/, const KernelArgs& args) {
  const Tensor& grad = args.in(0);
  const Tensor& weight = args.in(1);
  if (is_ragged(args) && weight.num_elements() > 0) return multiply_ragged(args, false);
  multiply(args, {.m = grad.shape[0],
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
  const Tensor& x = args.in(0);
  const Tensor& grad = args.in(1);
  const Tensor& sum = args.out(0);
  if (!sum || sum.num_elements() == 0) return;
  if (is_ragged(args)) {
    return cuda::grouped_wgrad(
        {.experts = single_expert(args, grad.shape[1], x.shape[1], args.in_extent(0)),
         .dtype = x.dtype,
         .num_rows = x.shape[0],
         .narrow = grad.data,
         .wide = x.data,
         .grad = sum.as<float>(),
         .accumulate = !args.set_accumulators},
        stream_of(args));
  }
  multiply(args, {.transpose_a = true,
                  .m = grad.shape[1],
                  .n = x.shape[1],
                  .k = x.shape[0],
                  .a = grad.data,
                  .lda = grad.shape[1],
                  .b = x.data,
                  .ldb = x.shape[1],
                  .c = sum.data,
                  .ldc = x.shape[1],
                  .input_type = x.dtype,
                  .output_type = DType::kF32,
                  .accumulate = !args.set_accumulators});
}

void linear_bias_grad(const Operator& /*op*/, const KernelArgs& args) {
  const Tensor& grad = args.in(0);
  if (!args.out(0)) return;
  cuda::launch_column_sums({.data = grad.data,
                            .bf16 = grad.dtype == DType::kBF16,
                            .num_rows = grad.shape[0],
                            .num_columns = grad.shape[1],
                            .extent = args.in_extent(0)},
                           reinterpret_cast<float*>(args.workspace.data()), args.out(0).as<float>(),
                           stream_of(args));
}

/// Where ragged rows begin and end, or F32 sums before the bias.
int64_t linear_workspace(const Operator& /*op*/, std::span<const ValueType> inputs) {
  constexpr int64_t kRowRange = 2 * sizeof(int64_t);
  if (inputs.size() < 3) return inputs[0].ragged() ? kRowRange : 0;
  if (inputs[0].dtype == DType::kF32) return 0;
  const int64_t num_columns = inputs[1].shape[0];
  return std::min(inputs[0].shape[0], rows_before_bias(num_columns)) * num_columns *
         static_cast<int64_t>(sizeof(float));
}

int64_t bias_grad_workspace(const Operator& /*op*/, std::span<const ValueType> inputs) {
  return cuda::kLinearSumChunks * inputs[0].shape[1] * static_cast<int64_t>(sizeof(float));
}

}  // namespace

void add_linear_cuda(KernelTable& table) {
  table["linear"] = {linear, linear_workspace};
  table["linear_dgrad"] = {linear_dgrad, linear_workspace};
  table["linear_wgrad"] = Kernel(linear_wgrad, linear_workspace).setting_accumulators();
  table["linear_bias_grad"] = {linear_bias_grad, bias_grad_workspace};
}

}  // namespace tessera
