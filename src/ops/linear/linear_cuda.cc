#include <algorithm>

#include "ops/cuda/column_sums.h"
#include "ops/cuda/matrix_product.h"
#include "ops/cuda/row_args.h"
#include "ops/grouped_matmul/grouped_matmul_cuda.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_products.h"

namespace tessera {
namespace {

using cuda::context_of;
using cuda::multiply;
using cuda::stream_of;
using Extra = Linear::Extra;

/// Rows of a BF16 result with bias that are made at a time in F32: cuBLASLt has no such product
/// with an F32 bias. Enough for a product that fills the GPU.
int64_t rows_before_bias(int64_t num_columns) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  constexpr int64_t kUnit = 128;  // rows of a product's tile
  const int64_t row_bytes = static_cast<int64_t>(sizeof(float)) * std::max<int64_t>(num_columns, 1);
  return std::max(kBytes / row_bytes / kUnit, int64_t{1}) * kUnit;
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

/// y = rows · weight, or rows · weightᵀ `by_out`, for as many rows as `extent` says.
void multiply_ragged(const KernelArgs& args, const Tensor& rows, const int64_t* extent,
                     const Tensor& weight, const Tensor& y, bool by_out) {
  cuda::grouped_rows({.experts = single_expert(args, weight.shape[0], weight.shape[1], extent),
                      .dtype = rows.dtype,
                      .by_out = by_out,
                      .num_rows = rows.shape[0],
                      .a = rows.data,
                      .weight = weight.data,
                      .y = y.data},
                     stream_of(args));
}

/// Rows beyond the extent of ragged ones are multiplied too: each gives a row of the result that
/// nobody reads.
void run_with_bias(const Args<Linear>& args) {
  Gemm product = forward_product(args.in(Linear::kX), args.in(Linear::kWeight));
  const Tensor& out = args.out(Linear::kY);
  const auto* bias = args.in(Linear::kBias).as<float>();
  const bool narrow = is_low_precision(out.dtype);
  auto* const sums = narrow ? reinterpret_cast<float*>(args.workspace.data()) : out.as<float>();
  const int64_t rows = product.m;
  const int64_t step = narrow ? rows_before_bias(product.n) : std::max<int64_t>(rows, 1);
  product.output_type = DType::kF32;
  product.c = sums;
  for (int64_t first = 0; first < rows; first += step) {
    product.m = std::min(step, rows - first);
    multiply(args, product);
    cuda::launch_add_bias(
        sums, bias, static_cast<std::byte*>(out.data) + first * product.n * dtype_size(out.dtype),
        out.dtype, product.m, product.n, stream_of(args));
    product.a = static_cast<const std::byte*>(product.a) +
                product.m * product.k * dtype_size(product.input_type);
  }
}

/// Whether the kernel of a single row takes the product, and is the quickest: it spends less on
/// starting than cuBLASLt's, which are as good where there is much to read.
bool is_one_row(const Gemm& product) {
  constexpr int64_t kMostColumns = 16384;
  constexpr int64_t kVector = 8;
  const auto addresses =
      reinterpret_cast<uintptr_t>(product.a) | reinterpret_cast<uintptr_t>(product.b);
  return product.input_type == DType::kBF16 && product.m == 1 && product.n <= kMostColumns &&
         product.n % 2 == 0 && product.n > 0 && product.k > 0 && product.k % kVector == 0 &&
         addresses % 16 == 0;
}

void linear(const Linear& op, const Args<Linear>& args) {
  using Op = Linear;
  const Extra extra = op.extra();
  const Tensor& x = args.in(Op::kX);
  const Tensor& weight = args.in(Op::kWeight);
  const Tensor& y = args.out(Op::kY);
  if (extra == Extra::kBias) return run_with_bias(args);
  const int64_t* extent = args.in_extent(Op::kX);
  if (extent != nullptr && weight.num_elements() > 0)
    return multiply_ragged(args, x, extent, weight, y, true);
  Gemm product = forward_product(x, weight);
  product.c = y.data;
  const void* addend = extra == Extra::kAddend ? args.in(Op::kAddend).data : nullptr;
  if (!is_one_row(product)) return multiply(args, product, addend);
  cuda::launch_one_linear_row({.num_columns = product.n,
                               .width = product.k,
                               .x = product.a,
                               .weight = product.b,
                               .addend = addend,
                               .y = product.c},
                              stream_of(args));
}

void linear_dgrad(const LinearDgrad& op, const Args<LinearDgrad>& args) {
  using Op = LinearDgrad;
  const Tensor& grad = args.in(Op::kGrad);
  const Tensor& weight = args.in(Op::kWeight);
  const int64_t* extent = args.in_extent(Op::kGrad);
  if (extent != nullptr && weight.num_elements() > 0)
    return multiply_ragged(args, grad, extent, weight, args.out(Op::kGradX), false);
  Gemm product = input_grad_product(grad, weight);
  product.c = args.out(Op::kGradX).data;
  multiply(args, product, op.addend() ? args.in(Op::kAddend).data : nullptr);
}

void linear_wgrad(const LinearWgrad& /*op*/, const Args<LinearWgrad>& args) {
  using Op = LinearWgrad;
  const Tensor& x = args.in(Op::kX);
  const Tensor& grad = args.in(Op::kGrad);
  const Tensor& sum = args.out(Op::kGradWeight);
  if (!sum || sum.num_elements() == 0) return;
  if (args.in_extent(Op::kX) != nullptr) {
    return cuda::grouped_wgrad(
        {.experts = single_expert(args, grad.shape[1], x.shape[1], args.in_extent(Op::kX)),
         .dtype = x.dtype,
         .num_rows = x.shape[0],
         .narrow = grad.data,
         .wide = x.data,
         .grad = sum.as<float>(),
         .accumulate = !args.set_accumulators},
        stream_of(args));
  }
  Gemm product = weight_grad_product(x, grad);
  product.c = sum.data;
  product.accumulate = !args.set_accumulators;
  multiply(args, product);
}

void linear_bias_grad(const LinearBiasGrad& /*op*/, const Args<LinearBiasGrad>& args) {
  using Op = LinearBiasGrad;
  const Tensor& grad = args.in(Op::kGrad);
  if (!args.out(Op::kGradBias)) return;
  const int64_t width = grad.shape[1];
  cuda::launch_column_sums({.dtype = grad.dtype,
                            .rows = cuda::rows_of(args, Op::kGrad, width),
                            .cols = width,
                            .x = grad.data,
                            .accumulator = cuda::accumulator_of(args, args.out(Op::kGradBias)),
                            .partials = reinterpret_cast<float*>(args.workspace.data()),
                            .num_sms = context_of(args).num_sms()},
                           stream_of(args));
}

/// Where ragged rows begin and end.
int64_t row_range_bytes(const ValueType& rows) {
  return rows.ragged() ? 2 * static_cast<int64_t>(sizeof(int64_t)) : 0;
}

/// Where ragged rows begin and end, or F32 sums before the bias.
int64_t linear_workspace(const Linear& op, std::span<const ValueType> inputs) {
  if (op.extra() != Extra::kBias) return row_range_bytes(inputs[Linear::kX]);
  if (product_dtype(inputs[Linear::kX].dtype) == DType::kF32) return 0;
  const int64_t num_columns = inputs[Linear::kWeight].shape[0];
  return std::min(inputs[Linear::kX].shape[0], rows_before_bias(num_columns)) * num_columns *
         static_cast<int64_t>(sizeof(float));
}

int64_t dgrad_workspace(const LinearDgrad& /*op*/, std::span<const ValueType> inputs) {
  return row_range_bytes(inputs[LinearDgrad::kGrad]);
}

int64_t wgrad_workspace(const LinearWgrad& /*op*/, std::span<const ValueType> inputs) {
  return row_range_bytes(inputs[LinearWgrad::kX]);
}

int64_t bias_grad_workspace(const LinearBiasGrad& /*op*/, std::span<const ValueType> inputs) {
  return cuda::column_sums_bytes(inputs[LinearBiasGrad::kGrad].shape[1]);
}

}  // namespace

void add_linear_cuda(KernelTable& table) {
  add_kernel<Linear>(table, linear, {.workspace = linear_workspace, .takes = takes_f16});
  add_kernel<LinearDgrad>(table, linear_dgrad, {.workspace = dgrad_workspace, .takes = takes_f16});
  add_kernel<LinearWgrad>(
      table, linear_wgrad,
      {.workspace = wgrad_workspace, .sets_accumulators = true, .takes = takes_f16});
  add_kernel<LinearBiasGrad>(table, linear_bias_grad,
                             {.workspace = bias_grad_workspace, .sets_accumulators = true});
}

}  // namespace tessera
