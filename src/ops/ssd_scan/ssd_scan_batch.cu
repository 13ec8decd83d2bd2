// The scan of several sequences' tokens, token by token: a block keeps some columns of a head's
// state in registers, each by some lanes of a warp.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/ssd_scan/ssd_scan_kernels.h"
#include "ops/ssd_scan/ssd_steps.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

/// How a state [N, P] lies in a block: a column's rows in kParts lanes of kPer each.
template <int kLanesOfColumn, int kRowsOfLane>
struct StateShape {
  static constexpr int kParts = kLanesOfColumn;
  static constexpr int kPer = kRowsOfLane;
  static constexpr int kRows = kParts * kPer;
  static constexpr int kColumns = kThreads / kParts;
};

/// B and C of a token, and what a thread brings of it.
template <int kRows>
struct SharedVectors {
  alignas(16) float b[kRows];
  alignas(16) float c[kRows];
};

/// By the block: rows behind the state's are 0.
template <typename T, int kRows>
__device__ __forceinline__ void take_vectors(SharedVectors<kRows>& to, const SsdRows& x,
                                             int64_t token, int group) {
  const int64_t at = (token * x.groups + group) * x.state_size;
  __syncthreads();
  for (int n = static_cast<int>(threadIdx.x); n < kRows; n += kThreads) {
    const bool there = n < x.state_size;
    to.b[n] = there ? load<1>(static_cast<const T*>(x.b) + at + n)[0] : 0.0F;
    to.c[n] = there ? load<1>(static_cast<const T*>(x.c) + at + n)[0] : 0.0F;
  }
  __syncthreads();
}

/// A thread's rows of its column: four neighbours in turn with the other lanes.
template <typename Shape>
struct StateRows {
  static constexpr int kStep = 4;
  float values[Shape::kPer];
  int part;

  __device__ __forceinline__ int row(int i) const {
    return (i / kStep * Shape::kParts + part) * kStep + i % kStep;
  }
  /// Moves on by a token that writes `written` times B, and gives what its C reads.
  __device__ __forceinline__ float move_on(float decay, float written,
                                           const SharedVectors<Shape::kRows>& token) {
    float read = 0;
#pragma unroll
    for (int i = 0; i < Shape::kPer; ++i) {
      values[i] = decay * values[i] + written * token.b[row(i)];
      read += values[i] * token.c[row(i)];
    }
#pragma unroll
    for (int step = 1; step < Shape::kParts; step *= 2) read += __shfl_xor_sync(~0U, read, step);
    return read;
  }
};

/// By the block: zeros in its part of rows behind the last sequence's.
template <typename T>
__device__ void clear_rest(const SsdBatch& p, int64_t at, int64_t stride) {
  for (int64_t t = p.x.bounds[p.x.num_sequences] + static_cast<int>(blockIdx.x); t < p.x.tokens;
       t += static_cast<int>(gridDim.x))
    store(static_cast<T*>(p.y) + t * stride + at, Floats<1>{});
}

/// Whose rows a block takes, and where their states are.
struct BatchSequence {
  int begin = 0;
  int end = 0;
  int slot = 0;
  bool is_first = false;
};

__device__ BatchSequence find_sequence(const SsdBatch& p) {
  if (p.x.num_sequences == 0) return {};
  BatchSequence rows{.begin = p.x.bounds[blockIdx.x], .end = p.x.bounds[blockIdx.x + 1]};
  if (rows.begin >= rows.end) return rows;
  const int length = p.lengths[blockIdx.x];
  rows.slot = p.slots[blockIdx.x];
  rows.is_first = length == rows.end - rows.begin;
  if (length < rows.end - rows.begin || rows.slot < 0 || rows.slot >= p.num_slots ||
      rows.end > p.x.tokens)
    fail("ssd_scan_batch: new tokens of a sequence that cannot have them, or no slot", rows.slot);
  return rows;
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(kThreads) scan_batch(const __grid_constant__ SsdBatch p) {
  wait_for_earlier();
  let_next_begin();
  __shared__ SharedVectors<Shape::kRows> vectors;
  const SsdRows& x = p.x;
  const auto head = static_cast<int>(blockIdx.y);
  const auto thread = static_cast<int>(threadIdx.x);
  const int column = static_cast<int>(blockIdx.z) * Shape::kColumns + thread / Shape::kParts;
  const bool there = column < x.head_size;
  const int64_t stride = static_cast<int64_t>(x.heads) * x.head_size;
  const int64_t at = static_cast<int64_t>(head) * x.head_size + column;
  StateRows<Shape> state{{}, thread % Shape::kParts};
  const bool gives = there && state.part == 0;
  if (gives) clear_rest<T>(p, at, stride);
  const BatchSequence rows = find_sequence(p);
  if (rows.begin >= rows.end) return;
  float* const own =
      p.states + (static_cast<int64_t>(rows.slot) * x.heads + head) * x.state_size * x.head_size +
      column;
#pragma unroll
  for (int i = 0; i < Shape::kPer; ++i) {
    const int row = state.row(i);
    const bool kept = !rows.is_first && there && row < x.state_size;
    state.values[i] = kept ? own[static_cast<int64_t>(row) * x.head_size] : 0.0F;
  }
  const float skip = x.skip[head];
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    take_vectors<T>(vectors, x, t, head / (x.heads / x.groups));
    const float value = there ? load<1>(static_cast<const T*>(x.x) + t * stride + at)[0] : 0.0F;
    const SsdStep step = step_of<T>(x, t * x.heads + head);
    const float read = state.move_on(expf(step.log_decay), step.size * value, vectors);
    if (gives) store(static_cast<T*>(p.y) + t * stride + at, Floats<1>{{read + skip * value}});
  }
#pragma unroll
  for (int i = 0; i < Shape::kPer; ++i) {
    const int row = state.row(i);
    if (there && row < x.state_size) own[static_cast<int64_t>(row) * x.head_size] = state.values[i];
  }
}

}  // namespace

void launch_ssd_scan_batch(const SsdBatch& batch, cudaStream_t stream) {
  const SsdRows& x = batch.x;
  if (x.tokens == 0) return;
  const auto launch = [&]<typename Shape>(auto kernel, Shape) {
    const dim3 blocks(static_cast<unsigned>(x.num_sequences > 0 ? x.num_sequences : 1),
                      static_cast<unsigned>(x.heads),
                      static_cast<unsigned>(divide_up(x.head_size, Shape::kColumns)));
    launch_early(kernel, {blocks, kThreads}, stream, batch);
  };
  with_type(x.dtype, [&]<typename T>() {
    const auto run = [&](auto shape) { launch(scan_batch<T, decltype(shape)>, shape); };
    if (x.state_size <= 32) return run(StateShape<4, 8>{});
    if (x.state_size <= 128) return run(StateShape<4, 32>{});
    static_assert(kMaxSsdWidth == 16 * 32);
    run(StateShape<16, 32>{});
  });
}

}  // namespace tessera::cuda
