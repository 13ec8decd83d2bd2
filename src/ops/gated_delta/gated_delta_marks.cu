#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/gated_delta/gated_delta_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads)
    mark_starts(const __grid_constant__ DeltaOperands x, int32_t* starts) {
  wait_for_earlier();
  const int token = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (token >= x.tokens) return;
  if (x.bounds == nullptr) {
    starts[token] = *x.start == 0 ? 0 : -1;
  } else {
    starts[token] = x.bounds[find_part(x.bounds, x.num_sequences, token)];
  }
}

/// Of a row; lanes take elements or pairs of them in turn.
template <typename T>
__device__ __forceinline__ float inverse_length(const T* row, int size) {
  float squares = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < size; i += 32) {
    const auto value = static_cast<float>(row[i]);
    squares += value * value;
  }
  return 1.0F / sqrtf(sum_lanes(squares) + kDeltaUnitEps);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    mark_lengths(const __grid_constant__ DeltaOperands x, DeltaMarks marks) {
  wait_for_earlier();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= static_cast<int64_t>(x.tokens) * x.key_heads) return;
  const float of_q = inverse_length(static_cast<const T*>(x.q) + row * x.key_size, x.key_size);
  const float of_k = inverse_length(static_cast<const T*>(x.k) + row * x.key_size, x.key_size);
  if (threadIdx.x % 32 == 0) {
    marks.q_inverse[row] = of_q;
    marks.k_inverse[row] = of_k;
  }
}

/// A thread takes a chunk of a head.
__global__ void __launch_bounds__(kThreads)
    sum_decays(const __grid_constant__ DeltaOperands x, DeltaMarks marks) {
  wait_for_earlier();
  const int64_t task = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (task >= static_cast<int64_t>(x.num_chunks()) * x.heads) return;
  const int head = static_cast<int>(task % x.heads);
  const int first = static_cast<int>(task / x.heads) * kDeltaRows;
  const int last = min(first + kDeltaRows, x.tokens);
  float sum = 0;
#pragma unroll 8
  for (int token = first; token < last; ++token) {
    const int64_t at = static_cast<int64_t>(token) * x.heads + head;
    sum = (marks.starts[token] == token ? 0 : sum) + x.decay[at];
    marks.sums[at] = sum;
  }
}

/// The gradient of a row from that of the row as a unit vector times `scale`, a sum over `group`
/// rows that are `stride` apart.
template <typename T>
__device__ __forceinline__ void write_unit_grad(T* to, const T* row, const float* grads, int group,
                                                int64_t stride, int size, float inverse,
                                                float scale) {
  const auto total = [&](int i) {
    float sum = 0;
    for (int g = 0; g < group; ++g) sum += grads[g * stride + i];
    return sum;
  };
  float along = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < size; i += 32)
    along += static_cast<float>(row[i]) * total(i);
  along = sum_lanes(along) * inverse * inverse;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < size; i += 32) {
    const float grad = (total(i) - along * static_cast<float>(row[i])) * inverse * scale;
    store(to + i, Floats<1>{grad});
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    write_unit_grads(const __grid_constant__ DeltaOperands x, DeltaMarks marks,
                     DeltaUnitGrads grads) {
  wait_for_earlier();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= static_cast<int64_t>(x.tokens) * x.key_heads) return;
  const int size = x.key_size;
  const int group = x.heads / x.key_heads;
  const int64_t at = row * size;
  const float scale = 1.0F / sqrtf(static_cast<float>(size));
  write_unit_grad(static_cast<T*>(grads.q) + at, static_cast<const T*>(x.q) + at,
                  grads.of_q + at * group, group, size, size, marks.q_inverse[row], scale);
  write_unit_grad(static_cast<T*>(grads.k) + at, static_cast<const T*>(x.k) + at,
                  grads.of_k + at * group, group, size, size, marks.k_inverse[row], 1.0F);
}

unsigned thread_blocks(int64_t threads) {
  return static_cast<unsigned>(divide_up(threads, kThreads));
}
unsigned row_blocks(const DeltaOperands& x) {
  return static_cast<unsigned>(divide_up(static_cast<int64_t>(x.tokens) * x.key_heads, kWarps));
}

}  // namespace

void launch_delta_starts(const DeltaOperands& x, int32_t* starts, cudaStream_t stream) {
  launch_early(mark_starts, {thread_blocks(x.tokens), kThreads}, stream, x, starts);
}

void launch_delta_lengths(const DeltaOperands& x, const DeltaMarks& marks, cudaStream_t stream) {
  with_type(x.dtype, [&]<typename T>() {
    launch_early(mark_lengths<T>, {row_blocks(x), kThreads}, stream, x, marks);
  });
}

void launch_delta_marks(const DeltaOperands& x, const DeltaMarks& marks, cudaStream_t stream) {
  launch_delta_starts(x, marks.starts, stream);
  launch_delta_lengths(x, marks, stream);
  launch_early(sum_decays, {thread_blocks(num_delta_chunks(x.tokens) * x.heads), kThreads}, stream,
               x, marks);
}

void launch_delta_unit_grads(const DeltaOperands& x, const DeltaMarks& marks,
                             const DeltaUnitGrads& grads, cudaStream_t stream) {
  with_type(x.dtype, [&]<typename T>() {
    launch_early(write_unit_grads<T>, {row_blocks(x), kThreads}, stream, x, marks, grads);
  });
}

}  // namespace tessera::cuda
