#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/grad_norm/grad_norm_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumThreads = 1024;
constexpr int kBatch = 8;

__device__ __forceinline__ double sum_block(double x) {
  __shared__ double warps[32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) total += warps[warp];
  return total;
}

template <typename T, int kWidth>
__device__ __forceinline__ double square(const Pack<T, kWidth>& values) {
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const double x = static_cast<float>(values.at[i]);
    sum += x * x;
  }
  return sum;
}

/// The sum of squares of a chunk of up to `length` elements, by a block.
template <typename T, int kWidth>
__device__ __forceinline__ double sum_chunk(const T* x, int length) {
  constexpr int kStep = kThreads * kWidth;
  double sum = 0;
  for (int first = static_cast<int>(threadIdx.x) * kWidth; first < length;
       first += kBatch * kStep) {
    Pack<T, kWidth> values[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = first + b * kStep;
      values[b] = {};
      if (at + kWidth <= length) {
        values[b] = load_pack<kWidth>(x + at);
      } else {
        for (int i = 0; i < kWidth; ++i)
          if (at + i < length) values[b].at[i] = x[at + i];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) sum += square(values[b]);
  }
  return sum_block(sum);
}

__device__ __forceinline__ int length_of(int64_t count, int64_t begin) {
  return static_cast<int>(count - begin < kSquaresChunk ? count - begin : kSquaresChunk);
}

// A block for each chunk.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    sum_chunks(const T* x, int64_t count, double* partials) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSquaresChunk;
  const double sum = sum_chunk<T, kWidth>(x + begin, length_of(count, begin));
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

/// Slices of one type whose chunks one launch takes.
struct SliceList {
  static constexpr int kMax = 128;
  SquaresSlice slices[kMax];
  int first_chunk[kMax + 1];
  int count;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_chunks_of_list(const __grid_constant__ SliceList list, double* partials) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int chunk = static_cast<int>(blockIdx.x);
  const int i = find_part(list.first_chunk, list.count, chunk);
  const SquaresSlice slice = list.slices[i];
  const int64_t begin = static_cast<int64_t>(chunk - list.first_chunk[i]) * kSquaresChunk;
  const T* const x = static_cast<const T*>(slice.x) + begin;
  const int length = length_of(slice.count, begin);
  constexpr int kWidth = kVectorWidth<T>;
  const bool aligned = reinterpret_cast<uintptr_t>(x) % sizeof(Pack<T, kWidth>) == 0;
  const double sum = aligned ? sum_chunk<T, kWidth>(x, length) : sum_chunk<T, 1>(x, length);
  if (threadIdx.x == 0) partials[chunk] = sum;
}

/// The sums whose chunks one launch adds, a block each.
struct SumList {
  static constexpr int kMax = 480;
  int64_t first;             // partial result of the first sum
  int num_chunks[kMax + 1];  // of the sums before each
};

__global__ void __launch_bounds__(kSumThreads)
    add_chunks(const __grid_constant__ SumList list, const double* partials, double* sums) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int end = list.num_chunks[blockIdx.x + 1];
  double total = 0;
#pragma unroll 4
  for (int i = list.num_chunks[blockIdx.x] + static_cast<int>(threadIdx.x); i < end;
       i += kSumThreads)
    total += partials[list.first + i];
  total = sum_block(total);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

constexpr int kClipThreads = 256;

/// The losses that one launch looks at.
struct LossList {
  static constexpr int kMax = 256;
  const float* losses[kMax];
  int count;
};

/// The sums in order, by one thread from what a block loads; the result is thread 0's.
__device__ __forceinline__ double add_in_order(const double* sums, int64_t count) {
  __shared__ double values[kClipThreads];
  double total = 0;
  for (int64_t first = 0; first < count; first += kClipThreads) {
    const int64_t at = first + threadIdx.x;
    if (at < count) values[threadIdx.x] = sums[at];
    __syncthreads();
    const int here = static_cast<int>(min(count - first, int64_t{kClipThreads}));
    if (threadIdx.x == 0)
      for (int i = 0; i < here; ++i) total = __dadd_rn(total, values[i]);
    __syncthreads();
  }
  return total;
}

// Each operation is rounded by itself, as on the host.
__device__ __forceinline__ void clip(const GradClipArgs& args, const double (&limits)[2],
                                     double total, bool bad_loss) {
  const double grad_scale = limits[0];
  const double max_norm = limits[1];
  const double norm = bad_loss ? nan("") : __dmul_rn(__dsqrt_rn(total), fabs(grad_scale));
  const bool finite = isfinite(norm);
  double factor = 1;
  if (finite && max_norm > 0) factor = fmin(1.0, __ddiv_rn(max_norm, __dadd_rn(norm, 1e-6)));
  args.norm[0] = norm;
  args.norm[1] = factor;
  args.grad_scale[0] = static_cast<float>(__dmul_rn(grad_scale, factor));
  args.grad_scale[1] = finite ? 0.0F : 1.0F;
}

/// Launches before the last leave in grad_scale[1] whether a loss so far was not finite.
__global__ void __launch_bounds__(kClipThreads)
    clip_gradients(const __grid_constant__ LossList list, const GradClipArgs args, bool first,
                   bool last) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int own = static_cast<int>(threadIdx.x);
  double limits[2] = {};  // like the losses behind the bus, so both are asked for at once
  if (own == 0) {
    limits[0] = args.limits[0];
    limits[1] = args.limits[1];
  }
  const bool own_bad = own < list.count && !isfinite(*list.losses[own]);
  const bool any_bad = __syncthreads_or(own_bad) != 0 || (!first && args.grad_scale[1] != 0);
  if (!last) {
    __syncthreads();
    if (own == 0) args.grad_scale[1] = any_bad ? 1.0F : 0.0F;
    return;
  }
  const double total = add_in_order(args.sums, args.num_sums);
  if (own == 0) clip(args, limits, total, any_bad);
}

int64_t num_chunks(const SquaresSlice& slice) {
  return divide_up(slice.count, kSquaresChunk);
}

void sum_alone(const SquaresSlice& slice, double* partials, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(num_chunks(slice));
  with_vectors(slice.dtype, are_aligned(slice.x), [&]<typename T, int kWidth>() {
    launch_early(sum_chunks<T, kWidth>, {blocks, kThreads}, stream, static_cast<const T*>(slice.x),
                 slice.count, partials);
  });
}

/// Slices one after the other whose partial results are too: small ones gather in a list.
class ChunkSums {
 public:
  ChunkSums(double* partials, cudaStream_t stream) : partials_(partials), stream_(stream) {}

  void add(const SquaresSlice& slice) {
    const int64_t chunks = num_chunks(slice);
    if (chunks > kListedChunks) {
      flush();
      sum_alone(slice, partials_, stream_);
      partials_ += chunks;
      return;
    }
    if (list_.count == SliceList::kMax || (list_.count > 0 && list_.slices[0].dtype != slice.dtype))
      flush();
    list_.slices[list_.count] = slice;
    list_.first_chunk[list_.count + 1] = list_.first_chunk[list_.count] + static_cast<int>(chunks);
    ++list_.count;
  }
  void flush() {
    const int chunks = list_.first_chunk[list_.count];
    if (chunks > 0) {
      with_type(list_.slices[0].dtype, [&]<typename T>() {
        launch_early(sum_chunks_of_list<T>, {static_cast<unsigned>(chunks), kThreads}, stream_,
                     list_, partials_);
      });
    }
    partials_ += chunks;
    list_.count = 0;
  }

 private:
  static constexpr int64_t kListedChunks =
      256;  // what takes longer than a launch is launched alone

  double* partials_;
  cudaStream_t stream_;
  SliceList list_ = {};
};

}  // namespace

void launch_sums_of_squares(std::span<const SquaresSlice> slices, double* partials, double* sums,
                            cudaStream_t stream) {
  ChunkSums chunk_sums(partials, stream);
  for (const SquaresSlice& slice : slices) chunk_sums.add(slice);
  chunk_sums.flush();
  SumList list = {};
  for (size_t begin = 0; begin < slices.size(); begin += SumList::kMax) {
    const auto part = slices.subspan(begin, std::min<size_t>(SumList::kMax, slices.size() - begin));
    list.first += list.num_chunks[begin == 0 ? 0 : SumList::kMax];
    for (size_t i = 0; i < part.size(); ++i)
      list.num_chunks[i + 1] = list.num_chunks[i] + static_cast<int>(num_chunks(part[i]));
    launch_early(add_chunks, {static_cast<unsigned>(part.size()), kSumThreads}, stream, list,
                 partials, sums + begin);
  }
}

void launch_grad_clip(const GradClipArgs& args, std::span<const float* const> losses,
                      cudaStream_t stream) {
  static_assert(LossList::kMax == kClipThreads);
  bool first = true;
  do {
    const auto here = losses.first(std::min<size_t>(LossList::kMax, losses.size()));
    losses = losses.subspan(here.size());
    LossList list = {.losses = {}, .count = static_cast<int>(here.size())};
    std::copy(here.begin(), here.end(), list.losses);
    launch_early(clip_gradients, {1, kClipThreads}, stream, list, args, first, losses.empty());
    first = false;
  } while (!losses.empty());
}

}  // namespace tessera::cuda
