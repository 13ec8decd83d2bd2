// A block of threads turns 128 × 128 elements, four at a time, in shared memory.
#include "ops/cuda/check.h"
#include "ops/quantize/quantize_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 128;
constexpr int kWords = kSide / 4;  // of a row

/// Which tile a block of threads turns.
struct Tile {
  int64_t matrix;
  int64_t down;
  int64_t across;
};

__device__ __forceinline__ Tile find_tile(const BlockMatrices& m) {
  const int64_t across = m.num_columns / kSide;
  const int64_t row = blockIdx.x / across;
  const int64_t down = m.num_rows / kSide;
  return {row / down, row % down, blockIdx.x % across};
}

__global__ void __launch_bounds__(kThreads) turn_blocks_kernel(const BlockMatrices m) {
  // A word more than it has, so that the threads of a warp read different banks.
  __shared__ uint32_t words[kSide][kWords + 1];
  const Tile tile = find_tile(m);
  const int64_t first = tile.matrix * m.num_rows * m.num_columns;
  const uint8_t* const x = m.x + first + tile.down * kSide * m.num_columns + tile.across * kSide;
  uint8_t* const y = m.y + first + tile.across * kSide * m.num_rows + tile.down * kSide;
#pragma unroll 4
  for (int at = static_cast<int>(threadIdx.x); at < kSide * kWords; at += kThreads) {
    const int row = at / kWords;
    const int word = at % kWords;
    words[row][word] = *reinterpret_cast<const uint32_t*>(x + row * m.num_columns + word * 4);
  }
  __syncthreads();
  for (int at = static_cast<int>(threadIdx.x); at < kSide * kWords; at += kThreads) {
    const int column = at / kWords;
    const int word = at % kWords;
    uint32_t turned = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const uint32_t source = words[word * 4 + byte][column / 4];
      turned |= (source >> (column % 4 * 8) & 0xffU) << (byte * 8);
    }
    *reinterpret_cast<uint32_t*>(y + column * m.num_rows + word * 4) = turned;
  }
  if (threadIdx.x != 0) return;
  const int64_t across = m.num_columns / kSide;
  const int64_t down = m.num_rows / kSide;
  const int64_t first_scale = tile.matrix * down * across;
  m.turned_scales[first_scale + tile.across * down + tile.down] =
      m.scales[first_scale + tile.down * across + tile.across];
}

}  // namespace

void launch_turn_blocks(const BlockMatrices& matrices, cudaStream_t stream) {
  const int64_t tiles =
      matrices.num_matrices * (matrices.num_rows / kSide) * (matrices.num_columns / kSide);
  turn_blocks_kernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(matrices);
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
