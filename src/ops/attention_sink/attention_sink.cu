#include "ops/attention_sink/attention_sink_kernels.h"
#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct SinkMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 8;
  struct Loaded {
    Pack<T, kWidth> o;
    float distance;  ///< of the row's log-sum-exp from the sink
  };

  SinkRows rows;
  T* y;

  __device__ int64_t width() const { return static_cast<int64_t>(rows.num_heads) * rows.head_size; }
  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t column = static_cast<int64_t>(vector) * kWidth;
    const auto head = static_cast<uint32_t>(column) / static_cast<uint32_t>(rows.head_size);
    return {load_pack<kWidth>(static_cast<const T*>(rows.o) + row * width() + column),
            rows.lse[head * rows.num_tokens + row] - rows.sinks[head]};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const float share = sigmoid(loaded.distance);
    Floats<kWidth> values = to_floats(loaded.o);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] *= share;
    cuda::store(y + row * width() + static_cast<int64_t>(vector) * kWidth, values);
  }
};

constexpr int kWarps = 8;

// A warp for each head of each token.
template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    scale_heads_backward(const SinkRows rows, const SinkGrads grads) {
  wait_for_earlier();
  const int64_t head_row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t row = head_row / rows.num_heads;
  if (row >= rows.num_tokens) return;
  const auto head = static_cast<int>(head_row - row * rows.num_heads);
  const int64_t of_row = head * rows.num_tokens + row;
  const int64_t at = head_row * rows.head_size;
  const float share = sigmoid(rows.lse[of_row] - rows.sinks[head]);
  float dot = 0;
  for (int column = static_cast<int>(threadIdx.x) % 32 * kWidth; column < rows.head_size;
       column += 32 * kWidth) {
    const Floats<kWidth> o = load<kWidth>(static_cast<const T*>(rows.o) + at + column);
    Floats<kWidth> g = load<kWidth>(static_cast<const T*>(grads.grad) + at + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      dot = fmaf(g[i], o[i], dot);
      g[i] *= share;
    }
    store(static_cast<T*>(grads.grad_o) + at + column, g);
  }
  dot = sum_lanes(dot);
  if (threadIdx.x % 32 == 0) grads.grad_lse[of_row] = dot * share * (1.0F - share);
}

constexpr int kSumThreads = 512;

// A block for each head, whose threads' sums are added in their order.
__global__ void __launch_bounds__(kSumThreads)
    take_from_sinks(const float* grad_lse, int64_t num_tokens, float* grad_sinks) {
  __shared__ float sums[kSumThreads / 32];
  wait_for_earlier();
  const float* row = grad_lse + blockIdx.x * num_tokens;
  float sum = 0;
  for (int64_t t = threadIdx.x; t < num_tokens; t += kSumThreads) sum += row[t];
  sum = sum_lanes(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
  for (const float part : sums) total += part;
  grad_sinks[blockIdx.x] -= total;
}

}  // namespace

void launch_attention_sink(const SinkRows& rows, void* y, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(rows.dtype, rows.head_size) && are_aligned(rows.o, y);
  with_vectors(rows.dtype, vectors, [&]<typename T, int kWidth>() {
    const int64_t width = static_cast<int64_t>(rows.num_heads) * rows.head_size;
    launch_map(SinkMap<T, kWidth>{rows, static_cast<T*>(y)}, {.bound = rows.num_tokens},
               width / kWidth, stream);
  });
}

void launch_attention_sink_backward(const SinkRows& rows, const SinkGrads& grads,
                                    cudaStream_t stream) {
  if (rows.num_tokens == 0) return;
  const bool vectors = are_whole_vectors(rows.dtype, rows.head_size) &&
                       are_aligned(rows.o, grads.grad, grads.grad_o);
  with_vectors(rows.dtype, vectors, [&]<typename T, int kWidth>() {
    const auto blocks = static_cast<unsigned>(divide_up(rows.num_tokens * rows.num_heads, kWarps));
    launch_early(scale_heads_backward<T, kWidth>, {blocks, 32 * kWarps}, stream, rows, grads);
  });
  if (grads.grad_sinks == nullptr) return;
  launch_early(take_from_sinks, {static_cast<unsigned>(rows.num_heads), kSumThreads}, stream,
               static_cast<const float*>(grads.grad_lse), rows.num_tokens, grads.grad_sinks);
}

}  // namespace tessera::cuda
