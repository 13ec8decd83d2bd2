#include "core/format.h"
#include "ops/quantize/turn_blocks.h"

namespace tessera {
namespace {

/// Matrices of `rows` × `columns` elements, transposed one by one.
template <typename T>
void turn_matrices(const T* from, int64_t matrices, int64_t rows, int64_t columns, T* to) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < matrices * columns; ++i) {
    const T* const column = from + i / columns * rows * columns + i % columns;
    for (int64_t row = 0; row < rows; ++row) to[i * rows + row] = column[row * columns];
  }
}

void turn_blocks(const TurnBlocks& op, const Args<TurnBlocks>& args) {
  constexpr int64_t kBlock = TurnBlocks::kBlock;
  const Tensor& x = args.in(TurnBlocks::kX);
  const Tensor& y = args.out(TurnBlocks::kY);
  const int64_t matrices = x.shape[0] / op.matrix_rows();
  turn_matrices(static_cast<const uint8_t*>(x.data), matrices, op.matrix_rows(), x.shape[1],
                static_cast<uint8_t*>(y.data));
  turn_matrices(scales_of(x).as<float>(), matrices, op.matrix_rows() / kBlock, x.shape[1] / kBlock,
                scales_of(y).as<float>());
}

}  // namespace

void add_turn_blocks_cpu(KernelTable& table) {
  add_kernel<TurnBlocks>(table, turn_blocks, {.takes = takes_block_weights});
}

}  // namespace tessera
