#include <omp.h>

#include <algorithm>
#include <functional>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/gemm/row_products.h"
#include "ops/gemm/tile_permission.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_products.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using Extra = Linear::Extra;

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

/// How many tiles of sums are worked on at once: on tile registers each thread takes rows from sum
/// to result, since products of so few rows are done before all threads have begun; but one where
/// the tiles of all threads would take more than 64 MiB.
int count_tiles(DType dtype, int64_t columns) {
  constexpr int64_t kMostElements = int64_t{16} << 20;
  const int threads = omp_get_max_threads();
  const bool fits = threads * kLinearTileRows * columns <= kMostElements;
  return dtype == DType::kBF16 && may_use_tiles() && fits ? threads : 1;
}

/// Rows `begin` on of `out`, as many as product.m says = what `fill` gives + the product, rounded
/// once by way of `tile`.
void add_tile(GemmFunction multiply, Gemm product, const Tensor& out, int64_t begin, float* tile,
              const FillRows& fill) {
  const int64_t cols = product.n;
  const int64_t end = begin + product.m;
  product.a = static_cast<const std::byte*>(product.a) +
              begin * product.lda * dtype_size(product.input_type);
  product.c = tile;
  fill(tile, begin, end);
  multiply(product);
#pragma omp parallel for schedule(static)
  for (int64_t row = begin; row < end; ++row)
    simd::convert(out.as<Bf16>() + row * cols, tile + (row - begin) * cols, cols);
}

/// `out` = what `fill` gives + the product, rounded once: a BF16 result by way of `tiles`.
void add_product(GemmFunction multiply, Gemm product, const Tensor& out, float* tiles,
                 const FillRows& fill) {
  const int64_t rows = product.m;
  product.output_type = DType::kF32;
  product.accumulate = true;
  if (out.dtype == DType::kF32) {
    product.c = out.as<float>();
    fill(out.as<float>(), 0, rows);
    return multiply(product);
  }
  constexpr int64_t kFewTiles = 4;
  const bool shares_out =
      count_tiles(product.input_type, product.n) > 1 && rows >= kFewTiles * kLinearTileRows;
#pragma omp parallel for schedule(dynamic, 1) if (shares_out)
  for (int64_t begin = 0; begin < rows; begin += kLinearTileRows) {
    Gemm part = product;
    part.m = std::min(rows - begin, kLinearTileRows);
    float* tile = tiles + (shares_out ? omp_get_thread_num() : 0) * kLinearTileRows * product.n;
    add_tile(multiply, part, out, begin, tile, fill);
  }
}

/// `out` = the product, and what `fill` gives; with scratch memory for the sum.
void run_product(GemmFunction multiply, Gemm product, const Tensor& out,
                 std::span<std::byte> workspace, const FillRows& fill) {
  if (fill) {
    add_product(multiply, product, out, reinterpret_cast<float*>(workspace.data()), fill);
  } else {
    product.c = out.data;
    multiply(product);
  }
}

template <GemmFunction kMultiply>
void linear(const Linear& op, const Args<Linear>& args) {
  const Extra extra = op.extra();
  FillRows fill;
  if (extra == Extra::kBias) fill = rows_of_bias(args.in(Linear::kBias));
  if (extra == Extra::kAddend) fill = rows_of_addend(args.in(Linear::kAddend));
  run_product(kMultiply, forward_product(args.in(Linear::kX), args.in(Linear::kWeight)),
              args.out(Linear::kY), args.workspace, fill);
}

void linear_dgrad(const LinearDgrad& op, const Args<LinearDgrad>& args) {
  using Op = LinearDgrad;
  const Tensor& grad = args.in(Op::kGrad);
  const Tensor& weight = args.in(Op::kWeight);
  const bool addend = op.addend();
  run_product(gemm, input_grad_product(grad, weight), args.out(Op::kGradX), args.workspace,
              addend ? rows_of_addend(args.in(Op::kAddend)) : FillRows());
}

void linear_wgrad(const LinearWgrad& /*op*/, const Args<LinearWgrad>& args) {
  using Op = LinearWgrad;
  if (!args.out(Op::kGradWeight)) return;
  const Tensor& x = args.in(Op::kX);
  const Tensor& grad = args.in(Op::kGrad);
  Gemm product = weight_grad_product(x, grad);
  product.c = args.out(Op::kGradWeight).data;
  product.accumulate = !args.set_accumulators;
  gemm(product);
}

void linear_bias_grad(const LinearBiasGrad& /*op*/, const Args<LinearBiasGrad>& args) {
  using Op = LinearBiasGrad;
  if (args.out(Op::kGradBias))
    add_columns_of(args.in(Op::kGrad), args.out(Op::kGradBias).as<float>(), args.workspace);
}

/// F32 rows of `columns` for what a BF16 product is added to.
int64_t tile_bytes(const ValueType& rows, int64_t columns) {
  if (product_dtype(rows.dtype) == DType::kF32) return 0;
  const int tiles = count_tiles(rows.dtype, columns);
  const int64_t tile_rows = tiles > 1 ? kLinearTileRows : std::min(rows.shape[0], kLinearTileRows);
  return tiles * tile_rows * columns * dtype_size(DType::kF32);
}

int64_t linear_workspace(const Linear& op, std::span<const ValueType> inputs) {
  return op.extra() == Extra::kNone
             ? 0
             : tile_bytes(inputs[Linear::kX], inputs[Linear::kWeight].shape[0]);
}

int64_t linear_dgrad_workspace(const LinearDgrad& op, std::span<const ValueType> inputs) {
  return op.addend() ? tile_bytes(inputs[LinearDgrad::kGrad], inputs[LinearDgrad::kWeight].shape[1])
                     : 0;
}

int64_t linear_bias_grad_workspace(const LinearBiasGrad& /*op*/,
                                   std::span<const ValueType> inputs) {
  return column_sums_bytes(inputs[LinearBiasGrad::kGrad].shape[1]);
}

}  // namespace

TESSERA_CPU_KERNELS(add_linear_cpu, table) {
  add_kernel<Linear>(table, linear<gemm>, {.workspace = linear_workspace, .takes = takes_f16});
  add_kernel<LinearDgrad>(table, linear_dgrad,
                          {.workspace = linear_dgrad_workspace, .takes = takes_f16});
  add_kernel<LinearWgrad>(table, linear_wgrad, {.sets_accumulators = true, .takes = takes_f16});
  add_kernel<LinearBiasGrad>(table, linear_bias_grad, {.workspace = linear_bias_grad_workspace});
}

TESSERA_CPU_KERNELS(add_linear_of_rows_cpu, table) {
  add_kernel<Linear>(table, linear<gemm_of_rows>, {.workspace = linear_workspace});
}

}  // namespace tessera
