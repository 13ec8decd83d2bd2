// Tiles of the matrix stay in registers between finding the largest value of each block and the
// rounding. Blocks that are larger than a tile take two passes, the first of which leaves the
// largest values in memory; so does the one that finds the largest of a group. Rotated values have
// a thread for each sixteen.
#include "ops/cuda/vector.cuh"
#include "ops/round_values/round_math.h"
#include "ops/round_values/round_values_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileColumns = 128;
constexpr int kFewRows = 32;
constexpr int kManyRows = 128;
/// Blocks of threads that are enough for any GPU.
constexpr int64_t kEnoughBlocks = 4096;
constexpr uint32_t kInfinity = 0x7f800000U;

/// How blocks lie in tiles along one dim: a tile has several whole ones, or a part of one.
struct Tiling {
  int64_t block;  ///< values of one
  int64_t tile;
  int blocks_of_tile;
  int64_t tiles_of_block;

  Tiling(int64_t block_values, int64_t tile_values)
      : block(block_values),
        tile(block > tile_values ? tile_values : tile_values / block * block),
        blocks_of_tile(block > tile_values ? 1 : static_cast<int>(tile_values / block)),
        tiles_of_block(block > tile_values ? divide_up(block, tile_values) : 1) {}

  __host__ __device__ bool is_whole() const { return tiles_of_block == 1; }
  __host__ __device__ int64_t num_tiles(int64_t count) const {
    if (is_whole()) return divide_up(count, tile);
    return count / block * tiles_of_block + divide_up(count % block, tile);
  }
  __host__ __device__ int64_t num_blocks(int64_t count) const { return divide_up(count, block); }
};

/// The values of a tile along one dim.
struct Part {
  int64_t first_block;
  int64_t first;
  int count;
};

__device__ __forceinline__ Part part_of(const Tiling& tiling, int64_t tile, int64_t count) {
  const bool whole = tiling.is_whole();
  const int64_t block = whole ? tile * tiling.blocks_of_tile : tile / tiling.tiles_of_block;
  const int64_t first =
      block * tiling.block + (whole ? 0 : tile % tiling.tiles_of_block * tiling.tile);
  const int64_t end_of_blocks = (block + tiling.blocks_of_tile) * tiling.block;
  const int64_t end = min(min(first + tiling.tile, end_of_blocks), count);
  return {block, first, static_cast<int>(max(end - first, int64_t{0}))};
}

enum class Task : uint8_t {
  kRound,         ///< blocks that are whole in a tile
  kFind,          ///< leaves the largest magnitudes in memory
  kRoundByFound,  ///< rounds by those
};

struct Rounding {
  const void* x;
  void* y;
  int64_t num_columns;
  RowGroups groups;
  Tiling rows;
  Tiling columns;
  Task task;
  bool nested;
  bool stochastic;
  uint32_t* largest;              ///< of each block, by group
  const uint32_t* group_largest;  ///< where scales are nested
};

struct RowRange {
  int64_t first;
  int64_t count;
};

__device__ __forceinline__ RowRange rows_of(const RowGroups& groups, int group) {
  if (groups.offsets != nullptr) {
    const int64_t first = groups.offsets[group];
    return {first, groups.offsets[group + 1] - first};
  }
  const int64_t count = groups.rows.in_use();
  return {groups.first + group * count, count};
}

__device__ __forceinline__ uint32_t magnitude_of(float value) {
  const uint32_t magnitude = word_of_float(value) & 0x7fffffffU;
  return magnitude > kInfinity ? 0 : magnitude;  // NaN is left out
}

/// Where a group's largest values begin: each may have one block of rows more than its share.
__device__ __forceinline__ int64_t first_found(const Rounding& r, const RowRange& rows, int group) {
  return (rows.first / r.rows.block + group) * r.columns.num_blocks(r.num_columns);
}

template <typename Number>
__device__ __forceinline__ float unit_of(const Rounding& r, int group) {
  return r.nested ? unit_of_group<Number>(float_of_word(r.group_largest[group])) : 1.0F;
}

/// Rounds a value, found at `place` of the matrix.
template <typename Number>
__device__ __forceinline__ float round_one(const Rounding& r, float value, float scale,
                                           float inverse, int64_t place) {
  // The inverse of a power of two is exact.
  const float scaled = r.nested ? divide_by_scale(value, scale) : __fmul_rn(value, inverse);
  const float rounded = r.stochastic ? round_up_as_often<Number>(
                                           scaled, uniform_of(value, static_cast<uint32_t>(place)))
                                     : round_nearest<Number>(scaled);
  return __fmul_rn(rounded, scale);
}

/// A thread's place in each tile: always the same columns, rows at equal distances.
template <int kWidth, int kRows>
struct ThreadPlace {
  static constexpr int kAcross = kTileColumns / kWidth;
  static constexpr int kStep = kThreads / kAcross;
  static constexpr int kPacks = kRows / kStep;
  /// So many packs of one value each are not worth the minute that they take to compile unrolled.
  static constexpr int kUnrolled = kPacks > 32 ? 1 : kPacks;

  int column = static_cast<int>(threadIdx.x) % kAcross * kWidth;
  int row = static_cast<int>(threadIdx.x) / kAcross;
};

/// The largest magnitudes of a tile's blocks: cells[block of rows][block of columns].
template <typename T, int kWidth, int kRows>
__device__ __forceinline__ void find_largest(const Rounding& r, const Pack<T, kWidth>* packs,
                                             int num_rows, int num_columns, uint32_t* cells) {
  using Place = ThreadPlace<kWidth, kRows>;
  const Place place;
  const bool alike = r.columns.block >= kTileColumns;  // all columns are of one block
  const bool one_cell = alike || r.columns.block % kWidth == 0;
#pragma unroll Place::kUnrolled
  for (int i = 0; i < Place::kPacks; ++i) {
    const int row = place.row + i * Place::kStep;
    const bool is_there = row < num_rows && place.column < num_columns;
    const int cell_row = r.rows.is_whole() ? row / static_cast<int>(r.rows.block) : 0;
    uint32_t* const of_row = cells + cell_row * r.columns.blocks_of_tile;
    if (one_cell) {
      uint32_t own = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (is_there) own = max(own, magnitude_of(static_cast<float>(packs[i].at[j])));
      if (alike) {
        constexpr int kLanes = Place::kAcross < 32 ? Place::kAcross : 32;
        const unsigned lanes = kLanes == 32 ? ~0U
                                            : ((1U << (kLanes % 32)) - 1)
                                                  << (threadIdx.x % 32 / kLanes * kLanes);
        own = __reduce_max_sync(lanes, own);
        if (is_there && threadIdx.x % kLanes == 0) atomicMax(of_row, own);
      } else if (is_there) {
        atomicMax(of_row + place.column / static_cast<int>(r.columns.block), own);
      }
    } else if (is_there) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        atomicMax(of_row + (place.column + j) / static_cast<int>(r.columns.block),
                  magnitude_of(static_cast<float>(packs[i].at[j])));
    }
  }
}

/// kRows of 128 columns at a time. Blocks of threads stand for the tiles beside one another (x),
/// the groups (y), and some of the tiles below one another (z).
template <typename T, typename Number, int kWidth, int kRows>
__global__ void __launch_bounds__(kThreads) round_tiles(const Rounding r) {
  wait_for_earlier();
  using Place = ThreadPlace<kWidth, kRows>;
  __shared__ uint32_t cells[kFewRows * kTileColumns];
  const int group = static_cast<int>(blockIdx.y);
  const RowRange range = rows_of(r.groups, group);
  const Part columns = part_of(r.columns, blockIdx.x, r.num_columns);
  const int64_t across = r.columns.num_blocks(r.num_columns);
  const int64_t num_tiles = r.rows.num_tiles(range.count);
  const T* const x = static_cast<const T*>(r.x);
  const Place place;
  const int num_cells = r.rows.blocks_of_tile * r.columns.blocks_of_tile;
  const float unit = r.task == Task::kFind ? 1.0F : unit_of<Number>(r, group);
  for (int64_t tile = blockIdx.z; tile < num_tiles; tile += gridDim.z) {
    const Part rows = part_of(r.rows, tile, range.count);
    const int64_t corner = (range.first + rows.first) * r.num_columns + columns.first;
    const auto is_there = [&](int row) { return row < rows.count && place.column < columns.count; };
    Pack<T, kWidth> packs[Place::kPacks];
#pragma unroll Place::kUnrolled
    for (int i = 0; i < Place::kPacks; ++i) {
      const int row = place.row + i * Place::kStep;
      if (is_there(row))
        packs[i] = load_pack<kWidth>(x + corner + row * r.num_columns + place.column);
    }
    const auto found_at = [&](int cell) {
      const int row = cell / r.columns.blocks_of_tile;
      const int column = cell % r.columns.blocks_of_tile;
      return r.largest + first_found(r, range, group) + (rows.first_block + row) * across +
             columns.first_block + column;
    };
    const auto exists = [&](int cell) {
      return rows.first_block + cell / r.columns.blocks_of_tile < r.rows.num_blocks(range.count) &&
             columns.first_block + cell % r.columns.blocks_of_tile < across;
    };
    __syncthreads();
    for (int cell = static_cast<int>(threadIdx.x); cell < num_cells; cell += kThreads)
      cells[cell] = r.task == Task::kRoundByFound && exists(cell) ? *found_at(cell) : 0;
    __syncthreads();
    if (r.task != Task::kRoundByFound) {
      find_largest<T, kWidth, kRows>(r, packs, rows.count, columns.count, cells);
      __syncthreads();
    }
    if (r.task == Task::kFind) {
      for (int cell = static_cast<int>(threadIdx.x); cell < num_cells; cell += kThreads)
        if (exists(cell) && cells[cell] != 0) atomicMax(found_at(cell), cells[cell]);
      continue;
    }
    for (int cell = static_cast<int>(threadIdx.x); cell < num_cells; cell += kThreads)
      cells[cell] =
          word_of_float(scale_of_block<Number>(float_of_word(cells[cell]), unit, r.nested));
    __syncthreads();
#pragma unroll Place::kUnrolled
    for (int i = 0; i < Place::kPacks; ++i) {
      const int row = place.row + i * Place::kStep;
      if (!is_there(row)) continue;
      const int cell_row = r.rows.is_whole() ? row / static_cast<int>(r.rows.block) : 0;
      const uint32_t* const of_row = cells + cell_row * r.columns.blocks_of_tile;
      const int64_t at = corner + row * r.num_columns + place.column;
      Floats<kWidth> rounded;
      float scale = 0;
      float inverse = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int column = place.column + j;
        if (j == 0 || r.columns.block % kWidth != 0) {
          const int cell = r.columns.is_whole() ? column / static_cast<int>(r.columns.block) : 0;
          scale = float_of_word(of_row[cell]);
          inverse = __fdiv_rn(1.0F, scale);
        }
        rounded[j] =
            round_one<Number>(r, static_cast<float>(packs[i].at[j]), scale, inverse, at + j);
      }
      store(static_cast<T*>(r.y) + at, rounded);
    }
  }
}

/// Rotates kSize values by signs and a Hadamard matrix (Sylvester's construction), over the root of
/// its size.
template <int kSize>
__device__ __forceinline__ void rotate(float* values) {
  const float factor = __fdiv_rn(1.0F, __fsqrt_rn(static_cast<float>(kSize)));
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    values[i] = __fmul_rn(values[i], (kRotationSigns >> i & 1U) != 0 ? -factor : factor);
#pragma unroll
  for (int half = 1; half < kSize; half *= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if ((i & half) != 0) continue;
      const float sum = __fadd_rn(values[i], values[i + half]);
      values[i + half] = __fsub_rn(values[i], values[i + half]);
      values[i] = sum;
    }
  }
}

/// Where there are fewer than 16 values, rotates the largest powers of two of them.
template <int kSize>
__device__ __forceinline__ void rotate_part(float* values, int count) {
  if constexpr (kSize > 0) {
    if ((count & kSize) != 0) {
#pragma unroll
      for (int first = 0; first + kSize <= static_cast<int>(kRotatedLength); first += 2 * kSize)
        if ((count & ~(2 * kSize - 1)) == first) rotate<kSize>(values + first);
    }
    rotate_part<kSize / 2>(values, count);
  }
}

/// Sixteen neighbours of a row (kDown: of a column) for each thread.
template <typename T, typename Number, bool kDown>
__global__ void __launch_bounds__(kThreads) round_rotated(const Rounding r) {
  wait_for_earlier();
  constexpr int kLength = static_cast<int>(kRotatedLength);
  const int group = static_cast<int>(blockIdx.y);
  const RowRange range = rows_of(r.groups, group);
  const int64_t across = kDown ? r.num_columns : divide_up(r.num_columns, kLength);
  const int64_t end = across * (kDown ? divide_up(range.count, kLength) : range.count);
  const float unit = unit_of<Number>(r, group);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / across * (kDown ? kLength : 1);
    const int64_t column = i % across * (kDown ? 1 : kLength);
    const int64_t first = (range.first + row) * r.num_columns + column;
    const int64_t step = kDown ? r.num_columns : 1;
    const int64_t left = kDown ? range.count - row : r.num_columns - column;
    const int count = left < kLength ? static_cast<int>(left) : kLength;
    float values[kLength];
#pragma unroll
    for (int k = 0; k < kLength; ++k)
      values[k] = k < count ? static_cast<float>(static_cast<const T*>(r.x)[first + k * step]) : 0;
    rotate_part<kLength>(values, count);
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kLength; ++k)
      if (k < count) largest = max(largest, magnitude_of(values[k]));
    const float scale = scale_of_block<Number>(float_of_word(largest), unit, r.nested);
    const float inverse = __fdiv_rn(1.0F, scale);
#pragma unroll
    for (int k = 0; k < kLength; ++k) {
      const int64_t place = first + k * step;
      if (k < count)
        static_cast<T*>(r.y)[place] =
            static_cast<T>(round_one<Number>(r, values[k], scale, inverse, place));
    }
  }
}

/// Calls run.operator()<Number>().
template <typename Run>
void with_number(NarrowNumber number, Run run) {
  switch (number) {
    case NarrowNumber::kE4M3:
      return run.template operator()<E4m3>();
    case NarrowNumber::kE5M2:
      return run.template operator()<E5m2>();
    case NarrowNumber::kE2M1:
      return run.template operator()<E2m1>();
  }
}

struct BlockSize {
  int64_t rows;
  int64_t columns;
};

BlockSize block_of(const CastSpec& cast, int sum_dim, int64_t num_rows, int64_t num_columns) {
  const int64_t rows = sum_dim == 1 ? cast.width : cast.length;
  const int64_t columns = sum_dim == 1 ? cast.length : cast.width;
  const auto at_most = [](int64_t size, int64_t all) {
    return std::max(size == 0 ? all : std::min(size, all), int64_t{1});
  };
  return {at_most(rows, num_rows), at_most(columns, num_columns)};
}

int64_t tile_rows(const BlockSize& block) {
  return block.rows > kFewRows && block.rows <= kManyRows ? kManyRows : kFewRows;
}

bool fits_tile(const BlockSize& block) {
  return block.rows <= kManyRows && block.columns <= kTileColumns;
}

bool takes_vectors(DType dtype, const Rounding& r) {
  const auto divides = [&](const Tiling& columns) {
    return columns.is_whole() ? are_whole_vectors(dtype, columns.tile)
                              : are_whole_vectors(dtype, columns.block);
  };
  return are_aligned(r.x, r.y) && are_whole_vectors(dtype, r.num_columns) &&
         (r.columns.block >= r.num_columns || divides(r.columns));
}

dim3 grid_of(const Rounding& r) {
  const int64_t across = r.columns.num_tiles(r.num_columns);
  const int64_t beside = across * r.groups.count;
  const int64_t down = std::clamp<int64_t>(divide_up(kEnoughBlocks, beside), 1,
                                           r.rows.num_tiles(r.groups.rows.bound));
  return {static_cast<unsigned>(across), static_cast<unsigned>(r.groups.count),
          static_cast<unsigned>(down)};
}

void launch_tiles(const RoundedGroups& groups, const Rounding& r, cudaStream_t stream) {
  with_vectors(groups.dtype, takes_vectors(groups.dtype, r), [&]<typename T, int kWidth>() {
    with_number(groups.cast.number, [&]<typename Number>() {
      const auto kernel = r.rows.is_whole() && r.rows.block > kFewRows
                              ? round_tiles<T, Number, kWidth, kManyRows>
                              : round_tiles<T, Number, kWidth, kFewRows>;
      launch_early(kernel, {grid_of(r), kThreads}, stream, r);
    });
  });
}

void launch_rotated(const RoundedGroups& groups, const Rounding& r, cudaStream_t stream) {
  const int64_t blocks =
      divide_up(groups.groups.rows.bound * groups.num_columns, kThreads * int64_t{kRotatedLength});
  const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(
                      divide_up(kEnoughBlocks, groups.groups.count), 1, blocks)),
                  static_cast<unsigned>(groups.groups.count));
  with_type(groups.dtype, [&]<typename T>() {
    with_number(groups.cast.number, [&]<typename Number>() {
      const auto kernel =
          groups.sum_dim == 0 ? round_rotated<T, Number, true> : round_rotated<T, Number, false>;
      launch_early(kernel, {grid, kThreads}, stream, r);
    });
  });
}

void clear(uint32_t* words, int64_t count, cudaStream_t stream) {
  check(cudaMemsetAsync(words, 0, static_cast<size_t>(count) * sizeof(uint32_t), stream));
}

int64_t blocks_of_groups(const BlockSize& block, int64_t num_rows, int64_t num_columns,
                         int64_t num_groups) {
  return (num_rows / block.rows + num_groups) * divide_up(num_columns, block.columns);
}

}  // namespace

int64_t round_scratch_words(const CastSpec& cast, int sum_dim, int64_t num_rows,
                            int64_t num_columns, int64_t num_groups) {
  const BlockSize block = block_of(cast, sum_dim, num_rows, num_columns);
  const int64_t found =
      fits_tile(block) ? 0 : blocks_of_groups(block, num_rows, num_columns, num_groups);
  return found + (cast.nested ? num_groups : 0);
}

void launch_round_values(const RoundedGroups& groups, cudaStream_t stream) {
  const RowGroups& rows = groups.groups;
  const int64_t num_columns = groups.num_columns;
  if (rows.count == 0 || rows.rows.bound == 0 || num_columns == 0) return;
  const CastSpec& cast = groups.cast;
  const auto rounding = [&](const BlockSize& block, Task task, uint32_t* largest) {
    return Rounding{.x = groups.x,
                    .y = groups.y,
                    .num_columns = num_columns,
                    .groups = rows,
                    .rows = Tiling(block.rows, tile_rows(block)),
                    .columns = Tiling(block.columns, kTileColumns),
                    .task = task,
                    .nested = cast.nested,
                    .stochastic = cast.stochastic,
                    .largest = largest,
                    .group_largest = groups.scratch};
  };
  uint32_t* const found = groups.scratch + (cast.nested ? rows.count : 0);
  if (cast.nested) {
    clear(groups.scratch, rows.count, stream);
    launch_tiles(groups, rounding({groups.num_rows, num_columns}, Task::kFind, groups.scratch),
                 stream);
  }
  const BlockSize block = block_of(cast, groups.sum_dim, groups.num_rows, num_columns);
  if (cast.rotated) return launch_rotated(groups, rounding(block, Task::kRound, found), stream);
  if (fits_tile(block)) return launch_tiles(groups, rounding(block, Task::kRound, found), stream);
  clear(found, blocks_of_groups(block, groups.num_rows, num_columns, rows.count), stream);
  launch_tiles(groups, rounding(block, Task::kFind, found), stream);
  launch_tiles(groups, rounding(block, Task::kRoundByFound, found), stream);
}

}  // namespace tessera::cuda
