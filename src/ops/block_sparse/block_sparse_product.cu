// Block-sparse products by tiles that never cross a block, on the ordinary cores for both types.
#include "ops/block_sparse/block_sparse_kernels.h"
#include "ops/cuda/exact_product.cuh"

namespace tessera::cuda {
namespace {

__host__ __device__ constexpr int divide_up(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

/// Where a block's values are: those of its block-row side by side, `stride` from row to row.
struct BlockPlace {
  int64_t first;
  int64_t stride;

  __device__ __forceinline__ BlockPlace(const DeviceTopology& t, int64_t block) {
    const int64_t row = t.row_indices[block];
    const int64_t begin = t.row_offsets[row];
    stride = (t.row_offsets[row + 1] - begin) * t.block_size;
    first = begin * t.block_size * t.block_size + (block - begin) * t.block_size;
  }
};

/// Part `part` of block blockIdx.x / parts, a tile of its rows and columns.
template <typename T, bool kLeftInner, bool kRightInner, int kColumns>
__global__ void __launch_bounds__(kExactThreads) make_sparse(const SparseOutput p, int parts) {
  using Left = ExactOperand<T, kLeftInner>;
  using Right = ExactOperand<T, kRightInner>;
  using Tile = ExactTile<Left, Right, kColumns>;
  __shared__ typename Tile::Shared shared;
  const DeviceTopology& t = p.topology;
  const int size = t.block_size;
  const int64_t block = blockIdx.x / parts;
  if (block >= t.row_offsets[t.max_block_rows]) return;
  const int part = static_cast<int>(blockIdx.x) % parts;
  const int column_parts = divide_up(size, kColumns);
  const int row = part / column_parts * kExactRows;
  const int column = part % column_parts * kColumns;
  const int64_t left_first = static_cast<int64_t>(t.row_indices[block]) * size;
  const int64_t right_first = static_cast<int64_t>(t.col_indices[block]) * size;
  const Left left(
      static_cast<const T*>(p.left.data) + left_first * (kLeftInner ? p.left.columns : 1), size,
      p.left.columns);
  const Right right(
      static_cast<const T*>(p.right.data) + right_first * (kRightInner ? p.right.columns : 1), size,
      p.right.columns);
  Tile tile;
  tile.add(shared, left, row, right, column, 0, p.inner);
  const BlockPlace place(t, block);
  T* values = static_cast<T*>(p.values) + place.first;
  tile.for_each([&](int i, int j, float sum) {
    if (row + i < size && column + j < size)
      store_value(values + (row + i) * place.stride + column + j, sum);
  });
}

/// Part `part` of the rows (columns) of block-row (block-column) blockIdx.x / parts.
template <typename T, bool kByRows, bool kCrossContiguous>
__global__ void __launch_bounds__(kExactThreads) make_dense(const DenseOutput p, int parts) {
  constexpr int kColumns = 64;
  using Sparse = ExactOperand<T, kByRows>;
  using Dense = ExactOperand<T, kCrossContiguous>;
  using Tile = ExactTile<Sparse, Dense, kColumns>;
  __shared__ typename Tile::Shared shared;
  const DeviceTopology& t = p.topology;
  const int size = t.block_size;
  const int64_t stripe = blockIdx.x / parts;
  if (kByRows && p.rows != nullptr && stripe * size >= *p.rows) return;
  const int along = static_cast<int>(blockIdx.x) % parts * kExactRows;
  const int64_t outer = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int32_t* offsets = kByRows ? t.row_offsets : t.col_offsets;
  Tile tile;
  for (int32_t i = offsets[stripe]; i < offsets[stripe + 1]; ++i) {
    const int32_t block = kByRows ? i : t.transpose_indices[i];
    const int64_t cross =
        static_cast<int64_t>(kByRows ? t.col_indices[block] : t.row_indices[block]) * size;
    const BlockPlace place(t, block);
    const Sparse sparse(static_cast<const T*>(p.values) + place.first, size, place.stride);
    const Dense dense(
        static_cast<const T*>(p.dense) + cross * (kCrossContiguous ? 1 : p.dense_columns), p.outer,
        p.dense_columns);
    tile.add(shared, sparse, along, dense, outer, 0, size);
  }
  tile.for_each([&](int i, int j, float sum) {
    if (along + i >= size || outer + j >= p.outer) return;
    const int64_t at = (stripe * size + along + i) * p.along_stride + (outer + j) * p.outer_stride;
    if (p.out == nullptr) {
      p.sum[at] += sum;
    } else {
      store_value(static_cast<T*>(p.out) + at, sum);
    }
  });
}

template <typename T, bool kLeftInner, bool kRightInner>
void launch_sparse_by(const SparseOutput& p, cudaStream_t stream) {
  const int size = p.topology.block_size;
  const int columns = size <= 16 ? 16 : 64;
  const int parts = divide_up(size, kExactRows) * divide_up(size, columns);
  const auto blocks = static_cast<unsigned>(p.topology.max_blocks * parts);
  if (columns == 16) {
    make_sparse<T, kLeftInner, kRightInner, 16><<<blocks, kExactThreads, 0, stream>>>(p, parts);
  } else {
    make_sparse<T, kLeftInner, kRightInner, 64><<<blocks, kExactThreads, 0, stream>>>(p, parts);
  }
}

template <typename T>
void launch_sparse_of(const SparseOutput& p, cudaStream_t stream) {
  const bool left_inner = !p.left.transposed;
  if (p.right.transposed) {
    left_inner ? launch_sparse_by<T, true, true>(p, stream)
               : launch_sparse_by<T, false, true>(p, stream);
  } else {
    left_inner ? launch_sparse_by<T, true, false>(p, stream)
               : launch_sparse_by<T, false, false>(p, stream);
  }
}

template <typename T, bool kByRows, bool kCrossContiguous>
void launch_dense_by(const DenseOutput& p, cudaStream_t stream) {
  const DeviceTopology& t = p.topology;
  const int parts = divide_up(t.block_size, kExactRows);
  const int64_t stripes = kByRows ? t.max_block_rows : t.num_block_cols;
  const dim3 grid(static_cast<unsigned>(stripes * parts),
                  static_cast<unsigned>(divide_up(p.outer, 64)));
  if (grid.x == 0 || grid.y == 0) return;
  make_dense<T, kByRows, kCrossContiguous><<<grid, kExactThreads, 0, stream>>>(p, parts);
}

template <typename T>
void launch_dense_of(const DenseOutput& p, cudaStream_t stream) {
  if (p.by_rows) {
    p.cross_contiguous ? launch_dense_by<T, true, true>(p, stream)
                       : launch_dense_by<T, true, false>(p, stream);
  } else {
    p.cross_contiguous ? launch_dense_by<T, false, true>(p, stream)
                       : launch_dense_by<T, false, false>(p, stream);
  }
}

}  // namespace

void launch_sparse_output(const SparseOutput& product, cudaStream_t stream) {
  if (product.topology.max_blocks == 0) return;
  product.type == SparseType::kF32 ? launch_sparse_of<float>(product, stream)
                                   : launch_sparse_of<__nv_bfloat16>(product, stream);
}

void launch_dense_output(const DenseOutput& product, cudaStream_t stream) {
  product.type == SparseType::kF32 ? launch_dense_of<float>(product, stream)
                                   : launch_dense_of<__nv_bfloat16>(product, stream);
}

}  // namespace tessera::cuda
