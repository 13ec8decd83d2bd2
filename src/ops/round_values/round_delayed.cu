// Values by one scale that is given: each is read once, rounded, and counted on the way. A block of
// threads sums up what its threads saw and adds that to the tally; integers, so in any order.
#include "ops/cuda/vector.cuh"
#include "ops/round_values/round_math.h"
#include "ops/round_values/round_values_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
/// Vectors that a thread takes at a time.
constexpr int kUnroll = 4;
/// Enough for any GPU.
constexpr int64_t kMostBlocks = 2048;
constexpr uint32_t kInfinity = 0x7f800000U;

/// What the threads of a block saw.
struct Seen {
  unsigned amax;
  unsigned saturated;
  unsigned nonfinite;
};

struct Elements {
  int64_t first;
  int64_t end;
};

__device__ __forceinline__ Elements elements_of(const DelayedRows& r) {
  if (r.offsets == nullptr) return {0, r.rows.in_use() * r.num_columns};
  return {r.offsets[0] * r.num_columns, r.offsets[r.num_groups] * r.num_columns};
}

template <typename Number>
__device__ __forceinline__ float round_one(float value, const DelayedScale& by, Seen& seen) {
  const uint32_t magnitude = word_of_float(value) & 0x7fffffffU;
  if (magnitude >= kInfinity) {
    ++seen.nonfinite;
    return NAN;
  }
  seen.amax = max(seen.amax, magnitude);
  seen.saturated += float_of_word(magnitude) > by.beyond ? 1U : 0U;
  return round_delayed<Number>(value, by);
}

__device__ __forceinline__ void add_to_tally(const DelayedRows& r, const Seen& seen,
                                             int64_t num_values) {
  const auto add = [](int64_t* row, TallyColumn column, unsigned long long value) {
    if (value != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(row + static_cast<int64_t>(column)), value);
  };
  for (int i = 0; i < r.num_places; ++i) {
    int64_t* const row = r.tally + r.places[i] * kTallyColumns;
    // Bits of numbers that are not negative are in their order.
    if (seen.amax != 0) {
      atomicMax(
          reinterpret_cast<unsigned long long*>(row + static_cast<int64_t>(TallyColumn::kAmax)),
          static_cast<unsigned long long>(seen.amax));
    }
    add(row, TallyColumn::kSaturated, seen.saturated);
    add(row, TallyColumn::kNonFinite, seen.nonfinite);
    if (blockIdx.x == 0)
      add(row, TallyColumn::kValues, static_cast<unsigned long long>(num_values));
  }
}

template <typename T, typename Number, int kWidth>
__global__ void __launch_bounds__(kThreads) round_all(const DelayedRows r) {
  wait_for_earlier();
  __shared__ Seen of_block;
  if (threadIdx.x == 0) of_block = {0, 0, 0};
  __syncthreads();
  const Elements all = elements_of(r);
  const DelayedScale by = delayed_scale<Number>(r.scales[r.places[0]], r.overflows);
  const T* const x = static_cast<const T*>(r.x);
  T* const y = static_cast<T*>(r.y);
  Seen seen{0, 0, 0};
  constexpr int64_t kStep = int64_t{kThreads} * kWidth;
  // Of whole rows, which are of whole vectors.
  for (int64_t base = all.first + int64_t{blockIdx.x} * kUnroll * kStep; base < all.end;
       base += int64_t{gridDim.x} * kUnroll * kStep) {
    Pack<T, kWidth> packs[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = base + u * kStep + int64_t{threadIdx.x} * kWidth;
      if (at < all.end) packs[u] = load_pack<kWidth>(x + at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = base + u * kStep + int64_t{threadIdx.x} * kWidth;
      if (at >= all.end) continue;
      Floats<kWidth> rounded;
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        rounded[j] = round_one<Number>(static_cast<float>(packs[u].at[j]), by, seen);
      store(y + at, rounded);
    }
  }
  if (r.tally == nullptr) return;
  seen.amax = __reduce_max_sync(~0U, seen.amax);
  seen.saturated = __reduce_add_sync(~0U, seen.saturated);
  seen.nonfinite = __reduce_add_sync(~0U, seen.nonfinite);
  if (threadIdx.x % 32 == 0) {
    atomicMax(&of_block.amax, seen.amax);
    atomicAdd(&of_block.saturated, seen.saturated);
    atomicAdd(&of_block.nonfinite, seen.nonfinite);
  }
  __syncthreads();
  if (threadIdx.x == 0) add_to_tally(r, of_block, all.end - all.first);
}

}  // namespace

void launch_round_delayed(const DelayedRows& rows, cudaStream_t stream) {
  const int64_t most = rows.rows.bound * rows.num_columns;
  if (most == 0) return;
  const bool vectors =
      are_aligned(rows.x, rows.y) && are_whole_vectors(rows.dtype, rows.num_columns);
  with_vectors(rows.dtype, vectors, [&]<typename T, int kWidth>() {
    const int64_t of_block = int64_t{kThreads} * kUnroll * kWidth;
    const auto blocks = static_cast<unsigned>(std::min(divide_up(most, of_block), kMostBlocks));
    const auto kernel = rows.number == NarrowNumber::kE4M3 ? round_all<T, E4m3, kWidth>
                                                           : round_all<T, E5m2, kWidth>;
    launch_early(kernel, {blocks, kThreads}, stream, rows);
  });
}

}  // namespace tessera::cuda
