// Block-sparse products by tiles that never cross a block: BF16 on the tensor cores where sizes and
// addresses are multiples of 8 values, all else on the ordinary cores.
#include "ops/block_sparse/block_sparse_kernels.h"
#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/tile/exact_product.cuh"
#include "ops/cuda/tile/fragment_tile.cuh"

namespace tessera::cuda {
namespace {

__host__ __device__ constexpr int divide_up(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

__device__ __forceinline__ int64_t actual(const StoredColumns& columns) {
  return columns.extent == nullptr ? columns.bound : *columns.extent;
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

struct OutputPlace {
  int64_t along_stride;
  int64_t outer_stride;

  __device__ __forceinline__ OutputPlace(const DenseOutput& p)
      : along_stride(p.outer_contiguous ? actual(p.out_columns) : 1),
        outer_stride(p.outer_contiguous ? 1 : actual(p.out_columns)) {}
  __device__ __forceinline__ int64_t operator()(int64_t along, int64_t outer) const {
    return along * along_stride + outer * outer_stride;
  }
};

/// Part `part` of block blockIdx.x / parts, a tile of its rows and columns.
template <typename T, bool kLeftInner, bool kRightInner, int kColumns>
__global__ void __launch_bounds__(kExactThreads) make_sparse(const SparseOutput p, int parts) {
  wait_for_earlier();
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
  const int64_t left_columns = actual(p.left.columns);
  const int64_t left_first = static_cast<int64_t>(t.row_indices[block]) * size;
  const int64_t right_columns = actual(p.right.columns);
  const int64_t right_first = static_cast<int64_t>(t.col_indices[block]) * size;
  const Left left(static_cast<const T*>(p.left.data) + left_first * (kLeftInner ? left_columns : 1),
                  size, left_columns);
  const Right right(
      static_cast<const T*>(p.right.data) + right_first * (kRightInner ? right_columns : 1), size,
      right_columns);
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
  wait_for_earlier();
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
  const int64_t dense_columns = actual(p.dense_columns);
  Tile tile;
  for (int32_t i = offsets[stripe]; i < offsets[stripe + 1]; ++i) {
    const int32_t block = kByRows ? i : t.transpose_indices[i];
    const int64_t cross =
        static_cast<int64_t>(kByRows ? t.col_indices[block] : t.row_indices[block]) * size;
    const BlockPlace place(t, block);
    const Sparse sparse(static_cast<const T*>(p.values) + place.first, size, place.stride);
    const Dense dense(
        static_cast<const T*>(p.dense) + cross * (kCrossContiguous ? 1 : dense_columns), p.outer,
        dense_columns);
    tile.add(shared, sparse, along, dense, outer, 0, size);
  }
  const OutputPlace place_of(p);
  tile.for_each([&](int i, int j, float sum) {
    if (along + i >= size || outer + j >= p.outer) return;
    const int64_t at = place_of(stripe * size + along + i, outer + j);
    if (p.out == nullptr) {
      p.sum[at] += sum;
    } else {
      store_value(static_cast<T*>(p.out) + at, sum);
    }
  });
}

/// As make_sparse, on the tensor cores.
template <bool kLeftInner, bool kRightInner, int kColumns>
__global__ void __launch_bounds__(FragmentTile<1, kLeftInner, 1, kRightInner, kColumns>::kThreads)
    make_sparse_fragments(const SparseOutput p, int parts) {
  wait_for_earlier();
  using Tile = FragmentTile<1, kLeftInner, 1, kRightInner, kColumns>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  const DeviceTopology& t = p.topology;
  const int size = t.block_size;
  const int64_t block = blockIdx.x / parts;
  if (block >= t.row_offsets[t.max_block_rows]) return;
  const int part = static_cast<int>(blockIdx.x) % parts;
  const int column_parts = divide_up(size, kColumns);
  const int row = part / column_parts * kFragmentTileRows;
  const int column = part % column_parts * kColumns;
  const int64_t left_columns = actual(p.left.columns);
  const int64_t left_first = static_cast<int64_t>(t.row_indices[block]) * size;
  const int64_t right_columns = actual(p.right.columns);
  const int64_t right_first = static_cast<int64_t>(t.col_indices[block]) * size;
  const FragmentOperand left{
      static_cast<const __nv_bfloat16*>(p.left.data) + left_first * (kLeftInner ? left_columns : 1),
      size, left_columns};
  const FragmentOperand right{static_cast<const __nv_bfloat16*>(p.right.data) +
                                  right_first * (kRightInner ? right_columns : 1),
                              size, right_columns};
  Tile tile;
  tile.add(shared, left, row, right, column, 0, p.inner);
  const float* result = tile.finish(shared);
  const BlockPlace place(t, block);
  auto* values = static_cast<__nv_bfloat16*>(p.values) + place.first;
  for (int at = threadIdx.x; at < kFragmentTileRows * kColumns / 4; at += Tile::kThreads) {
    const int i = at / (kColumns / 4);
    const int j = at % (kColumns / 4) * 4;
    if (row + i < size && column + j < size)
      store_four(values + (row + i) * place.stride + column + j,
                 *reinterpret_cast<const float4*>(result + i * Tile::kResultStride + j));
  }
}

/// As make_dense, on the tensor cores.
template <bool kByRows, bool kCrossContiguous>
__global__ void __launch_bounds__(FragmentTile<1, kByRows, 1, kCrossContiguous, 128>::kThreads)
    make_dense_fragments(const DenseOutput p, int parts) {
  wait_for_earlier();
  constexpr int kColumns = 128;
  using Tile = FragmentTile<1, kByRows, 1, kCrossContiguous, kColumns>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  const DeviceTopology& t = p.topology;
  const int size = t.block_size;
  const int64_t stripe = blockIdx.x / parts;
  if (kByRows && p.rows != nullptr && stripe * size >= *p.rows) return;
  const int along = static_cast<int>(blockIdx.x) % parts * kFragmentTileRows;
  const int64_t outer = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int32_t* offsets = kByRows ? t.row_offsets : t.col_offsets;
  const int64_t dense_columns = actual(p.dense_columns);
  Tile tile;
  for (int32_t i = offsets[stripe]; i < offsets[stripe + 1]; ++i) {
    const int32_t block = kByRows ? i : t.transpose_indices[i];
    const int64_t cross =
        static_cast<int64_t>(kByRows ? t.col_indices[block] : t.row_indices[block]) * size;
    const BlockPlace place(t, block);
    const FragmentOperand sparse{static_cast<const __nv_bfloat16*>(p.values) + place.first, size,
                                 place.stride};
    const FragmentOperand dense{
        static_cast<const __nv_bfloat16*>(p.dense) + cross * (kCrossContiguous ? 1 : dense_columns),
        p.outer, dense_columns};
    tile.add(shared, sparse, along, dense, outer, 0, size);
  }
  const float* result = tile.finish(shared);
  const OutputPlace place_of(p);
  // Neighbouring threads write neighbours.
  const bool outer_first = p.outer_contiguous;
  for (int at = threadIdx.x; at < kFragmentTileRows * kColumns; at += Tile::kThreads) {
    const int i = outer_first ? at / kColumns : at % kFragmentTileRows;
    const int j = outer_first ? at % kColumns : at / kFragmentTileRows;
    if (along + i >= size || outer + j >= p.outer) continue;
    const int64_t to = place_of(stripe * size + along + i, outer + j);
    const float sum = result[i * Tile::kResultStride + j];
    if (p.out == nullptr) {
      p.sum[to] += sum;
    } else {
      store_value(static_cast<__nv_bfloat16*>(p.out) + to, sum);
    }
  }
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

template <bool kLeftInner, bool kRightInner, int kColumns>
void launch_sparse_fragments(const SparseOutput& p, cudaStream_t stream) {
  using Tile = FragmentTile<1, kLeftInner, 1, kRightInner, kColumns>;
  const int size = p.topology.block_size;
  const int parts = divide_up(size, kFragmentTileRows) * divide_up(size, kColumns);
  const auto blocks = static_cast<unsigned>(p.topology.max_blocks * parts);
  constexpr int kBytes = sizeof(typename Tile::Shared);
  const auto kernel = make_sparse_fragments<kLeftInner, kRightInner, kColumns>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, {blocks, Tile::kThreads, kBytes}, stream, p, parts);
}

template <bool kByRows, bool kCrossContiguous>
void launch_dense_fragments(const DenseOutput& p, cudaStream_t stream) {
  using Tile = FragmentTile<1, kByRows, 1, kCrossContiguous, 128>;
  const DeviceTopology& t = p.topology;
  const int parts = divide_up(t.block_size, kFragmentTileRows);
  const int64_t stripes = kByRows ? t.max_block_rows : t.num_block_cols;
  const dim3 grid(static_cast<unsigned>(stripes * parts),
                  static_cast<unsigned>(divide_up(p.outer, 128)));
  if (grid.x == 0 || grid.y == 0) return;
  constexpr int kBytes = sizeof(typename Tile::Shared);
  const auto kernel = make_dense_fragments<kByRows, kCrossContiguous>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, {grid, Tile::kThreads, kBytes}, stream, p, parts);
}

/// Actual extents are multiples of the block size.
bool has_vectors(const StoredColumns& columns) {
  return columns.extent != nullptr || columns.bound % 8 == 0;
}

bool has_fragments(const SparseOutput& p) {
  return p.type == SparseType::kBf16 && has_vectors(p.left.columns) &&
         has_vectors(p.right.columns) && p.inner % 8 == 0 && is_aligned(p.left.data) &&
         is_aligned(p.right.data) && is_aligned(p.values);
}
bool has_fragments(const DenseOutput& p) {
  return p.type == SparseType::kBf16 && has_vectors(p.dense_columns) && p.outer % 8 == 0 &&
         is_aligned(p.dense) && is_aligned(p.values);
}

template <typename T, bool kLeftInner, bool kRightInner>
void launch_sparse_by(const SparseOutput& p, cudaStream_t stream) {
  const int size = p.topology.block_size;
  if (has_fragments(p)) {
    if (size <= 16) return launch_sparse_fragments<kLeftInner, kRightInner, 16>(p, stream);
    if (size <= 64) return launch_sparse_fragments<kLeftInner, kRightInner, 64>(p, stream);
    return launch_sparse_fragments<kLeftInner, kRightInner, 128>(p, stream);
  }
  const int columns = size <= 16 ? 16 : 64;
  const int parts = divide_up(size, kExactRows) * divide_up(size, columns);
  const auto blocks = static_cast<unsigned>(p.topology.max_blocks * parts);
  if (columns == 16) {
    launch_early(make_sparse<T, kLeftInner, kRightInner, 16>, {blocks, kExactThreads}, stream, p,
                 parts);
  } else {
    launch_early(make_sparse<T, kLeftInner, kRightInner, 64>, {blocks, kExactThreads}, stream, p,
                 parts);
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
  if (has_fragments(p)) return launch_dense_fragments<kByRows, kCrossContiguous>(p, stream);
  const DeviceTopology& t = p.topology;
  const int parts = divide_up(t.block_size, kExactRows);
  const int64_t stripes = kByRows ? t.max_block_rows : t.num_block_cols;
  const dim3 grid(static_cast<unsigned>(stripes * parts),
                  static_cast<unsigned>(divide_up(p.outer, 64)));
  if (grid.x == 0 || grid.y == 0) return;
  launch_early(make_dense<T, kByRows, kCrossContiguous>, {grid, kExactThreads}, stream, p, parts);
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
