// The gated delta rule of several sequences' tokens, token by token, and the same with a decay for
// each element of a key: a block keeps 64 columns of a head's state in registers, each by four
// lanes.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/gated_delta/gated_delta_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr int kColumnsOfWarp = 8;
constexpr int kColumns = kWarps * kColumnsOfWarp;
constexpr int kParts = kLanes / kColumnsOfWarp;  // lanes of a column

/// What a thread brings of a token: a value of the query and of the key, and its column's value; of
/// the decays the head's, or that of its value of the key.
struct DeltaToken {
  float q = 0;
  float k = 0;
  float v = 0;
  float decay = 0;
  float beta = 0;
};

/// Of a head and a column.
template <typename T, bool kByElement>
struct DeltaReader {
  const DeltaOperands& x;
  int head;
  int column;

  __device__ __forceinline__ DeltaToken read(int64_t token, int64_t end) const {
    DeltaToken result;
    if (token >= end) return result;
    const auto i = static_cast<int>(threadIdx.x);
    const int64_t key = x.key_at(token, x.key_head(head)) + i;
    if (i < x.key_size) {
      result.q = load<1>(static_cast<const T*>(x.q) + key)[0];
      result.k = load<1>(static_cast<const T*>(x.k) + key)[0];
      if (kByElement) result.decay = x.decay[key];
    }
    if (column < x.value_size)
      result.v = load<1>(static_cast<const T*>(x.v) + x.value_at(token, head) + column)[0];
    const int64_t gate = token * x.heads + head;
    if (!kByElement) result.decay = x.decay[gate];
    result.beta = x.beta[gate];
    return result;
  }
};

/// By the block: the unit vectors of a token's query and key, and what is left of the state by
/// elements of the key.
template <int kSize, bool kByElement>
struct UnitVectors {
  alignas(16) float q[kSize];
  alignas(16) float k[kSize];
  alignas(16) float kept[kByElement ? kSize : 1];
  float sums[kWarps][2];

  __device__ __forceinline__ void take(const DeltaToken& token, int key_size) {
    const auto thread = static_cast<int>(threadIdx.x);
    const float of_q = sum_lanes(token.q * token.q);
    const float of_k = sum_lanes(token.k * token.k);
    __syncthreads();
    if (thread % kLanes == 0) {
      sums[thread / kLanes][0] = of_q;
      sums[thread / kLanes][1] = of_k;
    }
    __syncthreads();
    float squares[2] = {};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      squares[0] += sums[warp][0];
      squares[1] += sums[warp][1];
    }
    if (thread < kSize) {
      q[thread] =
          token.q * rsqrtf(squares[0] + kDeltaUnitEps) * rsqrtf(static_cast<float>(key_size));
      k[thread] = token.k * rsqrtf(squares[1] + kDeltaUnitEps);
      if (kByElement) kept[thread] = expf(token.decay);
    }
    __syncthreads();
  }
};

__device__ __forceinline__ float sum_parts(float value) {
#pragma unroll
  for (int step = kColumnsOfWarp; step < kLanes; step *= 2)
    value += __shfl_xor_sync(~0U, value, step);
  return value;
}

/// A thread's values of its column of the state, kPer of kParts · kPer: four neighbours in turn.
template <int kPer>
struct StateColumn {
  static constexpr int kStep = 4;
  float values[kPer];
  int part;

  __device__ __forceinline__ int row(int i) const {
    return (i / kStep * kParts + part) * kStep + i % kStep;
  }
  /// Moves on by a token and gives what its query reads.
  template <int kSize, bool kByElement>
  __device__ __forceinline__ float move_on(const DeltaToken& token,
                                           const UnitVectors<kSize, kByElement>& unit) {
    const float decay = kByElement ? 1 : expf(token.decay);
    float seen = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      values[i] *= kByElement ? unit.kept[row(i)] : decay;
      seen += values[i] * unit.k[row(i)];
    }
    const float written = token.beta * (token.v - sum_parts(seen));
    float read = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      values[i] += written * unit.k[row(i)];
      read += values[i] * unit.q[row(i)];
    }
    return sum_parts(read);
  }
};

/// By the block: zeros in its part of rows behind the last sequence's.
template <typename T>
__device__ void clear_rest(const DeltaBatch& p, int column) {
  const DeltaOperands& x = p.x;
  if (threadIdx.x % kLanes >= kColumnsOfWarp || column >= x.value_size) return;
  const int end = p.bounds[p.num_sequences];
  for (int64_t t = end + static_cast<int>(blockIdx.x); t < x.tokens;
       t += static_cast<int>(gridDim.x))
    store(static_cast<T*>(p.o) + x.value_at(t, static_cast<int>(blockIdx.y)) + column, Floats<1>{});
}

template <typename T, int kPer, bool kByElement>
__global__ void __launch_bounds__(kThreads) run_batch(const __grid_constant__ DeltaBatch p) {
  wait_for_earlier();
  let_next_begin();
  __shared__ UnitVectors<kPer * kParts, kByElement> unit;
  const DeltaOperands& x = p.x;
  const auto head = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int column =
      static_cast<int>(blockIdx.z) * kColumns + warp * kColumnsOfWarp + lane % kColumnsOfWarp;
  clear_rest<T>(p, column);
  if (p.num_sequences == 0) return;
  const int begin = p.bounds[blockIdx.x];
  const int end = p.bounds[blockIdx.x + 1];
  if (begin >= end) return;
  const int length = p.lengths[blockIdx.x];
  const int slot = p.slots[blockIdx.x];
  if (length < end - begin || slot < 0 || slot >= p.num_slots || end > x.tokens)
    fail("gated_delta_batch: new tokens of a sequence that cannot have them, or no slot", slot);
  const bool there = column < x.value_size;
  float* const own =
      p.states + (static_cast<int64_t>(slot) * x.heads + head) * x.key_size * x.value_size + column;
  StateColumn<kPer> state{{}, lane / kColumnsOfWarp};
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int row = state.row(i);
    const bool kept = length > end - begin && there && row < x.key_size;
    state.values[i] = kept ? own[static_cast<int64_t>(row) * x.value_size] : 0;
  }
  const DeltaReader<T, kByElement> reader{x, head, column};
  DeltaToken token = reader.read(begin, end);
  for (int64_t t = begin; t < end; ++t) {
    unit.take(token, x.key_size);
    const DeltaToken next = reader.read(t + 1, end);
    const float o = state.move_on(token, unit);
    if (there && state.part == 0)
      store(static_cast<T*>(p.o) + x.value_at(t, head) + column, Floats<1>{{o}});
    token = next;
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int row = state.row(i);
    if (there && row < x.key_size) own[static_cast<int64_t>(row) * x.value_size] = state.values[i];
  }
}

template <bool kByElement>
void launch_batch(const DeltaBatch& batch, cudaStream_t stream) {
  const DeltaOperands& x = batch.x;
  const int sequences = batch.num_sequences > 0 ? batch.num_sequences : 1;
  const dim3 blocks(static_cast<unsigned>(sequences), static_cast<unsigned>(x.heads),
                    static_cast<unsigned>(divide_up(x.value_size, kColumns)));
  with_type(x.dtype, [&]<typename T>() {
    const auto launch = [&](auto kernel) {
      launch_early(kernel, {blocks, kThreads}, stream, batch);
    };
    if (x.key_size <= 8 * kParts) return launch(run_batch<T, 8, kByElement>);
    if (x.key_size <= 32 * kParts) return launch(run_batch<T, 32, kByElement>);
    static_assert(kMostBatchKeySize == 64 * kParts);
    launch(run_batch<T, 64, kByElement>);
  });
}

}  // namespace

void launch_delta_batch(const DeltaBatch& batch, cudaStream_t stream) {
  if (batch.x.tokens == 0) return;
  batch.decays_by_element ? launch_batch<true>(batch, stream) : launch_batch<false>(batch, stream);
}

}  // namespace tessera::cuda
