#include "ops/cuda/row_args.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/quantize_kernels.h"

namespace tessera {
namespace {

/// What a grid has in its dims but the first.
constexpr int64_t kMostBlocks = 65535;

/// What the kernels do not take is refused before anything runs.
int64_t check_turned(const Quantize& op, std::span<const ValueType> inputs) {
  if (!op.is_turned()) return 0;
  const ScaleLayout& scale = op.spec().scale;
  const Shape& shape = inputs[Quantize::kX].shape;
  const int64_t rows = op.spec().turned_rows;
  check_shape(op, scale == ScaleLayout::row() || scale == ScaleLayout::block(128, 128),
              "on a GPU what is turned has scales of rows or of 128x128, not '{}'",
              scale.to_string());
  check_shape(op, rows % Quantize::kTurnedUnit == 0 && shape[1] % Quantize::kTurnedUnit == 0,
              "on a GPU sizes of what is turned must be multiples of {}, got {} x {}",
              Quantize::kTurnedUnit, rows, shape[1]);
  check_shape(op, rows <= 128 * kMostBlocks && shape[0] / rows <= kMostBlocks,
              "on a GPU {} matrices of {} rows are too many to be turned", shape[0] / rows, rows);
  return 0;
}

void turn(const Quantize& op, const Args<Quantize>& args) {
  const Tensor& x = args.in(Quantize::kX);
  const Tensor& y = args.out(Quantize::kY);
  cuda::launch_quantize_turned({.dtype = x.dtype,
                                .element = y.dtype,
                                .x = x.data,
                                .y = y.data,
                                .scales = scales_of(y).as<float>(),
                                .num_matrices = x.shape[0] / op.spec().turned_rows,
                                .num_rows = op.spec().turned_rows,
                                .num_columns = x.shape[1],
                                .by_block = op.spec().scale.kind == ScaleLayout::Kind::kBlock},
                               cuda::stream_of(args));
}

void round_to_half(const Args<Quantize>& args) {
  const Tensor& x = args.in(Quantize::kX);
  cuda::launch_round_to_half({.dtype = x.dtype,
                              .x = x.data,
                              .y = args.out(Quantize::kY).data,
                              .rows = cuda::rows_of(args, Quantize::kX, x.shape[1]),
                              .num_columns = x.shape[1]},
                             cuda::stream_of(args));
}

void quantize(const Quantize& op, const Args<Quantize>& args) {
  const Tensor& x = args.in(Quantize::kX);
  const Tensor& y = args.out(Quantize::kY);
  if (x.num_elements() == 0) return;
  if (y.dtype == DType::kF16) return round_to_half(args);
  if (op.is_turned()) return turn(op, args);
  cuda::launch_quantize({.dtype = x.dtype,
                         .element = y.dtype,
                         .x = x.data,
                         .y = y.data,
                         .scales = scales_of(y).as<float>(),
                         .num_rows = x.shape[0],
                         .num_columns = x.shape[1],
                         .block_rows = op.block_rows(),
                         .block_columns = op.block_columns(x.shape[1]),
                         .extent = args.in_extent(Quantize::kX)},
                        cuda::stream_of(args));
}

}  // namespace

void add_quantize_cuda(KernelTable& table) {
  add_kernel<Quantize>(table, quantize, {.workspace = check_turned, .takes = takes_fp8});
}

}  // namespace tessera
