// Elements stay in registers between finding the largest of those that share a scale and the cast.
// Blocks of 1 × 128 have 16 threads each, those of 128 × 128 a block of threads; rows, and blocks
// of other sizes, a warp or a block of threads, which reads the elements twice where they are more
// than its registers hold.
#include "ops/cuda/fp8_cast.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/quantize/quantize_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kPacks = 8;  // of a thread, that stay in registers

// Of blocks of 1 × 128, as 16 threads have them.
constexpr int kShortBlock = 128;
constexpr int kShortPacks = 4;
constexpr int kShortThreads = 256;

constexpr int kRowThreads = 128;  // of whole rows

// Of blocks of 128 × 128.
constexpr int kSquare = 128;
constexpr int kSquareThreads = 256;
/// What a grid has in its dims but the first.
constexpr int64_t kMostDown = 65535;

/// The elements of one scale.
struct ScaledBox {
  int64_t first = 0;  // of the matrix
  int num_rows = 0;
  int num_columns = 0;
};

/// The largest of the values of threads that share a scale: a warp, or several one after the other.
__device__ __forceinline__ float find_largest(float value, int num_threads) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0U, value, step));
  if (num_threads == 32) return value;
  __shared__ float largest[kMaxThreads / 32];
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
  __syncthreads();
  const int first = static_cast<int>(threadIdx.x) / num_threads * (num_threads / 32);
  for (int warp = 0; warp < num_threads / 32; ++warp) value = fmaxf(value, largest[first + warp]);
  return value;
}

/// The part of the matrix that scale number `idx` is of; none behind the rows in use.
__device__ __forceinline__ ScaledBox box_of(const QuantizedRows& rows, uint32_t idx) {
  const auto across = static_cast<uint32_t>(divide_up(rows.num_columns, rows.block_columns));
  const int64_t row = idx / across * rows.block_rows;
  const int64_t column = idx % across * rows.block_columns;
  const int64_t end = rows.extent == nullptr ? rows.num_rows : min(*rows.extent, rows.num_rows);
  return {.first = row * rows.num_columns + column,
          .num_rows = static_cast<int>(max(min(rows.block_rows, end - row), int64_t{0})),
          .num_columns = static_cast<int>(min(rows.block_columns, rows.num_columns - column))};
}

/// kInRegisters: all packs of a box are, kPacks of a thread. kOneRow: boxes are parts of rows.
template <typename T, int kWidth, bool kE4m3, bool kInRegisters, bool kOneRow>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_kernel(const QuantizedRows rows, int threads_of_scale) {
  wait_for_earlier();
  const uint32_t scale_idx = (blockIdx.x * blockDim.x + threadIdx.x) / threads_of_scale;
  const ScaledBox box = box_of(rows, scale_idx);
  if (box.num_rows == 0) return;
  const int thread = static_cast<int>(threadIdx.x) % threads_of_scale;
  const T* const x = static_cast<const T*>(rows.x);
  auto* const y = static_cast<uint8_t*>(rows.y);
  const int across = box.num_columns / kWidth;
  const int num_packs = across * box.num_rows;
  const auto place = [&](int at) {
    if constexpr (kOneRow) return box.first + at * kWidth;
    return box.first + at / across * rows.num_columns + at % across * kWidth;
  };
  float own = 0;
  Pack<T, kWidth> kept[kInRegisters ? kPacks : 1];
  if constexpr (kInRegisters) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int at = thread + i * threads_of_scale;
      if (at < num_packs) kept[i] = load_pack<kWidth>(x + place(at));
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (thread + i * threads_of_scale < num_packs) own = largest_in(kept[i], own);
    }
  } else {
    for (int at = thread; at < num_packs; at += threads_of_scale)
      own = largest_in(load_pack<kWidth>(x + place(at)), own);
  }
  const float amax = find_largest(own, threads_of_scale);
  const float scale = scale_for<kE4m3>(amax);
  const float factor = __frcp_rn(scale);
  if constexpr (kInRegisters) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int at = thread + i * threads_of_scale;
      if (at < num_packs) store(y + place(at), cast<kE4m3>(kept[i], factor));
    }
  } else {
    for (int at = thread; at < num_packs; at += threads_of_scale)
      store(y + place(at), cast<kE4m3>(load_pack<kWidth>(x + place(at)), factor));
  }
  if (thread == 0) rows.scales[scale_idx] = scale;
}

/// Blocks of 1 × 128 of rows that are multiples of 128, which follow one another in memory.
template <typename T, bool kE4m3>
__global__ void __launch_bounds__(kShortThreads) quantize_short_kernel(const QuantizedRows rows) {
  wait_for_earlier();
  constexpr int kWidth = 8;
  constexpr int kThreadsOfScale = kShortBlock / kWidth;
  const int64_t in_use = rows.extent == nullptr ? rows.num_rows : min(*rows.extent, rows.num_rows);
  const int64_t end = in_use * rows.num_columns / kWidth;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kShortThreads * kShortPacks + threadIdx.x;
  const T* const x = static_cast<const T*>(rows.x);
  Pack<T, kWidth> kept[kShortPacks];
#pragma unroll
  for (int i = 0; i < kShortPacks; ++i) {
    const int64_t at = first + i * kShortThreads;
    if (at < end) kept[i] = load_pack_once<kWidth>(x + at * kWidth);
  }
#pragma unroll
  for (int i = 0; i < kShortPacks; ++i) {
    const int64_t at = first + i * kShortThreads;
    const bool is_there = at < end;
    float amax = is_there ? largest_in(kept[i], 0.0F) : 0.0F;
#pragma unroll
    for (int step = kThreadsOfScale / 2; step > 0; step /= 2)
      amax = fmaxf(amax, __shfl_xor_sync(~0U, amax, step));
    if (!is_there) continue;
    const float scale = scale_for<kE4m3>(amax);
    store(static_cast<uint8_t*>(rows.y) + at * kWidth, cast<kE4m3>(kept[i], __frcp_rn(scale)));
    if (threadIdx.x % kThreadsOfScale == 0) rows.scales[at / kThreadsOfScale] = scale;
  }
}

/// Whole rows of at most 32 · kPacksOfRow packs, several a warp.
template <typename T, bool kE4m3, int kPacksOfRow>
__global__ void __launch_bounds__(kRowThreads) quantize_rows_kernel(const QuantizedRows rows) {
  wait_for_earlier();
  constexpr int kWidth = 8;
  constexpr int kRows = kPacks / kPacksOfRow;
  const int64_t in_use = rows.extent == nullptr ? rows.num_rows : min(*rows.extent, rows.num_rows);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / 32;
  const int64_t first = warp * kRows;
  const int left = static_cast<int>(min(in_use - first, int64_t{kRows}));
  if (left <= 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int num_packs = static_cast<int>(rows.num_columns) / kWidth;
  const int64_t place = first * rows.num_columns + lane * kWidth;
  const T* const x = static_cast<const T*>(rows.x) + place;
  Pack<T, kWidth> kept[kRows][kPacksOfRow];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kPacksOfRow; ++i) {
      kept[r][i] = {};
      if (r < left && lane + 32 * i < num_packs)
        kept[r][i] = load_pack_once<kWidth>(x + r * rows.num_columns + 32 * kWidth * i);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= left) break;
    float own = 0;
#pragma unroll
    for (int i = 0; i < kPacksOfRow; ++i) own = largest_in(kept[r][i], own);
    const float scale = scale_for<kE4m3>(find_largest(own, 32));
    const float factor = __frcp_rn(scale);
    auto* const y = static_cast<uint8_t*>(rows.y) + place + r * rows.num_columns;
#pragma unroll
    for (int i = 0; i < kPacksOfRow; ++i)
      if (lane + 32 * i < num_packs) store(y + 32 * kWidth * i, cast<kE4m3>(kept[r][i], factor));
    if (lane == 0) rows.scales[first + r] = scale;
  }
}

/// Blocks of 128 × 128 of rows that are multiples of 8: each thread has 8 columns of 8 rows.
template <typename T, bool kE4m3>
__global__ void __launch_bounds__(kSquareThreads) quantize_square_kernel(const QuantizedRows rows) {
  wait_for_earlier();
  constexpr int kWidth = 8;
  constexpr int kAcross = kSquare / kWidth;
  constexpr int kRows = kSquare * kAcross / kSquareThreads;
  constexpr int kRowsApart = kSquare / kRows;
  const int64_t in_use = rows.extent == nullptr ? rows.num_rows : min(*rows.extent, rows.num_rows);
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kSquare;
  if (first_row >= in_use) return;
  const int64_t row = first_row + threadIdx.x / kAcross;
  const int64_t column =
      static_cast<int64_t>(blockIdx.x) * kSquare + threadIdx.x % kAcross * kWidth;
  // Rows of this thread that there are.
  const int left =
      column < rows.num_columns ? static_cast<int>(min(in_use - row, int64_t{kSquare})) : 0;
  const int64_t first = row * rows.num_columns + column;
  const int64_t apart = kRowsApart * rows.num_columns;
  const T* const x = static_cast<const T*>(rows.x) + first;
  Pack<T, kWidth> kept[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    kept[i] = i * kRowsApart < left ? load_pack_once<kWidth>(x + i * apart) : Pack<T, kWidth>{};
  float own = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) own = largest_in(kept[i], own);
  const float scale = scale_for<kE4m3>(find_largest(own, kSquareThreads));
  const float factor = __frcp_rn(scale);
  auto* const y = static_cast<uint8_t*>(rows.y) + first;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (i * kRowsApart < left) store(y + i * apart, cast<kE4m3>(kept[i], factor));
  if (threadIdx.x == 0) rows.scales[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = scale;
}

/// Elements that a thread takes at once: 8 where that leaves work for a warp, else 4 or 1.
int pack_width(const QuantizedRows& rows) {
  const int64_t columns = std::min(rows.block_columns, rows.num_columns);
  const bool aligned = are_aligned(rows.x, rows.y);
  const auto whole = [&](int64_t width) {
    return aligned && rows.num_columns % width == 0 && rows.block_columns % width == 0;
  };
  if (whole(8) && columns * rows.block_rows >= 8 * 32) return 8;
  return whole(4) ? 4 : 1;
}

template <typename T, int kWidth, bool kE4m3>
void launch_as(const QuantizedRows& rows, cudaStream_t stream) {
  const int64_t columns = std::min(rows.block_columns, rows.num_columns);
  const int64_t packs = divide_up(columns * std::min(rows.block_rows, rows.num_rows), kWidth);
  const auto fits = [&](int threads) { return packs <= int64_t{threads} * kPacks; };
  const int threads_of_scale = fits(32)    ? 32
                               : fits(64)  ? 64
                               : fits(128) ? 128
                               : fits(256) ? 256
                                           : kMaxThreads;
  const int threads = std::max(threads_of_scale, 128);
  const int64_t scales =
      divide_up(rows.num_rows, rows.block_rows) * divide_up(rows.num_columns, rows.block_columns);
  const int64_t blocks = divide_up(scales * threads_of_scale, threads);
  const bool one_row = rows.block_rows == 1;
  const auto kernel = !fits(kMaxThreads) ? quantize_kernel<T, kWidth, kE4m3, false, false>
                      : one_row          ? quantize_kernel<T, kWidth, kE4m3, true, true>
                                         : quantize_kernel<T, kWidth, kE4m3, true, false>;
  launch_early(kernel, {static_cast<unsigned>(blocks), static_cast<unsigned>(threads)}, stream,
               rows, threads_of_scale);
}

/// Whether quantize_short_kernel takes them.
bool are_short(const QuantizedRows& rows) {
  return rows.block_rows == 1 && rows.block_columns == kShortBlock &&
         rows.num_columns % kShortBlock == 0 && are_aligned(rows.x, rows.y);
}

template <typename T, bool kE4m3>
void launch_short(const QuantizedRows& rows, cudaStream_t stream) {
  const int64_t packs = rows.num_rows * rows.num_columns / 8;
  const int64_t blocks = divide_up(packs, kShortThreads * kShortPacks);
  launch_early(quantize_short_kernel<T, kE4m3>, {static_cast<unsigned>(blocks), kShortThreads},
               stream, rows);
}

/// The packs that a lane has of whole rows for quantize_rows_kernel; 0: it does not take them.
int packs_of_row(const QuantizedRows& rows) {
  const int64_t packs = divide_up(rows.num_columns, 8 * 32);
  if (rows.block_rows != 1 || rows.block_columns < rows.num_columns || rows.num_columns % 8 != 0 ||
      rows.num_columns < 8 * 32 || packs > kPacks / 2 || !are_aligned(rows.x, rows.y))
    return 0;
  return packs <= kPacks / 4 ? kPacks / 4 : kPacks / 2;
}

template <typename T, bool kE4m3, int kPacksOfRow>
void launch_rows(const QuantizedRows& rows, cudaStream_t stream) {
  const int64_t rows_of_block = kRowThreads / 32 * (kPacks / kPacksOfRow);
  const auto blocks = static_cast<unsigned>(divide_up(rows.num_rows, rows_of_block));
  launch_early(quantize_rows_kernel<T, kE4m3, kPacksOfRow>, {blocks, kRowThreads}, stream, rows);
}

/// Whether quantize_square_kernel takes them.
bool are_square(const QuantizedRows& rows) {
  return rows.block_rows == kSquare && rows.block_columns == kSquare && rows.num_columns % 8 == 0 &&
         are_aligned(rows.x, rows.y) && divide_up(rows.num_rows, kSquare) <= kMostDown;
}

template <typename T, bool kE4m3>
void launch_square(const QuantizedRows& rows, cudaStream_t stream) {
  const dim3 squares(static_cast<unsigned>(divide_up(rows.num_columns, kSquare)),
                     static_cast<unsigned>(divide_up(rows.num_rows, kSquare)));
  launch_early(quantize_square_kernel<T, kE4m3>, {squares, kSquareThreads}, stream, rows);
}

template <typename T, bool kE4m3>
void launch_of(const QuantizedRows& rows, cudaStream_t stream) {
  if (are_short(rows)) return launch_short<T, kE4m3>(rows, stream);
  if (are_square(rows)) return launch_square<T, kE4m3>(rows, stream);
  if (packs_of_row(rows) == kPacks / 4) return launch_rows<T, kE4m3, kPacks / 4>(rows, stream);
  if (packs_of_row(rows) == kPacks / 2) return launch_rows<T, kE4m3, kPacks / 2>(rows, stream);
  switch (pack_width(rows)) {
    case 8:
      return launch_as<T, 8, kE4m3>(rows, stream);
    case 4:
      return launch_as<T, 4, kE4m3>(rows, stream);
    default:
      return launch_as<T, 1, kE4m3>(rows, stream);
  }
}

}  // namespace

void launch_quantize(const QuantizedRows& rows, cudaStream_t stream) {
  with_type(rows.dtype, [&]<typename T>() {
    rows.element == DType::kE4M3 ? launch_of<T, true>(rows, stream)
                                 : launch_of<T, false>(rows, stream);
  });
}

}  // namespace tessera::cuda
