// A block takes a chunk of a head and some columns of its matrix, a column by a few lanes, which
// keep it in registers. What all columns read of the tokens comes through shared memory.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/ssd_scan/ssd_scan_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kOwn = 32;    // elements of a column that a lane has
constexpr int kTokens = 8;  // whose vectors lie in shared memory at once
static_assert(kSsdRows % kTokens == 0);

template <typename T>
struct PassVectors {
  const SsdVectors& vectors;
  int heads;
  int head;

  __device__ __forceinline__ const T* row(int64_t token) const {
    const int idx = head / (heads / vectors.count);
    return static_cast<const T*>(vectors.data) + (token * vectors.count + idx) * vectors.size;
  }
  __device__ __forceinline__ float factor(int64_t token) const {
    return vectors.factor == nullptr ? 1.0F : vectors.factor[token * heads + head];
  }
};

/// Which row of the column element `k` of a lane is.
template <int kLanes>
__device__ __forceinline__ int row_of(int k, int lane) {
  return ((k / 4) * kLanes + lane) * 4 + k % 4;
}

/// The vectors of some tokens; behind their ends 0.
template <typename T, int kLanes>
__device__ __forceinline__ void load_vectors(float* to, const PassVectors<T>& from, int first,
                                             int count) {
  constexpr int kRow = kOwn * kLanes;
  for (int at = static_cast<int>(threadIdx.x); at < count * kRow; at += kThreads) {
    const int token = first + at / kRow;
    const int i = at % kRow;
    to[at] =
        i < from.vectors.size ? static_cast<float>(from.row(token)[i]) * from.factor(token) : 0.0F;
  }
}

template <int kLanes>
struct PassColumn {
  float s[kOwn] = {};

  __device__ __forceinline__ void decay(float factor) {
#pragma unroll
    for (int k = 0; k < kOwn; ++k) s[k] = factor == 0.0F ? 0.0F : factor * s[k];
  }
  __device__ __forceinline__ void write(const float* vector, float value, int lane) {
#pragma unroll
    for (int k = 0; k < kOwn; k += 4) {
      const Floats<4> w = load<4>(vector + row_of<kLanes>(k, lane));
#pragma unroll
      for (int i = 0; i < 4; ++i) s[k + i] += w[i] * value;
    }
  }
  /// Of the whole column, the same in all its lanes.
  __device__ __forceinline__ float read(const float* vector, int lane) const {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kOwn; k += 4) {
      const Floats<4> r = load<4>(vector + row_of<kLanes>(k, lane));
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += r[i] * s[k + i];
    }
    return sum_lanes<kLanes>(sum);
  }
};

struct PassParams {
  SsdRows x;
  SsdPass pass;
  const float* decays;
};

/// Writes what the pass gives of a token.
template <typename T>
__device__ __forceinline__ void write_output(const PassParams& p, int token, int head, int own,
                                             float sum, float value) {
  const int64_t of_head = static_cast<int64_t>(token) * p.x.heads + head;
  const int64_t at = of_head * p.pass.value.size + own;
  if (p.pass.output == SsdOutput::kSums) {
    static_cast<float*>(p.pass.out)[at] = sum;
    return;
  }
  const float factor = p.pass.out_factor == nullptr ? 1.0F : p.pass.out_factor[of_head];
  store(static_cast<T*>(p.pass.out) + at, Floats<1>{factor * sum + p.x.skip[head] * value});
}

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) pass_chunks(const __grid_constant__ PassParams p) {
  wait_for_earlier();
  extern __shared__ __align__(16) float shared[];
  constexpr int kRow = kOwn * kLanes;
  float* const writes = shared;
  float* const reads = shared + kTokens * kRow;
  const SsdPass& pass = p.pass;
  const int head = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int own =
      static_cast<int>(blockIdx.z) * (kThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  const bool holds = own < pass.value.size;
  const int begin = static_cast<int>(blockIdx.x) * kSsdRows;
  const int count = min(kSsdRows, p.x.tokens - begin);
  const PassVectors<T> write{pass.write, p.x.heads, head};
  const PassVectors<T> value{pass.value, p.x.heads, head};
  const PassVectors<T> read{pass.read, p.x.heads, head};
  float* const states = pass.states + (static_cast<int64_t>(blockIdx.x) * p.x.heads + head) *
                                          pass.write.size * pass.value.size;
  const auto state_at = [&](int k) {
    return static_cast<int64_t>(row_of<kLanes>(k, lane)) * pass.summed_stride +
           static_cast<int64_t>(own) * pass.own_stride;
  };
  PassColumn<kLanes> column;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    const bool is_there = holds && row_of<kLanes>(k, lane) < pass.write.size;
    if (pass.starts_at_states && is_there) column.s[k] = states[state_at(k)];
  }
  float product = 1;
  for (int done = 0; done < count; done += kTokens) {
    const int some = min(kTokens, count - done);
    const int first = pass.reverse ? begin + count - done - some : begin + done;
    __syncthreads();
    load_vectors<T, kLanes>(writes, write, first, some);
    if (pass.output != SsdOutput::kStates) load_vectors<T, kLanes>(reads, read, first, some);
    __syncthreads();
    for (int i = 0; i < some; ++i) {
      const int row = pass.reverse ? some - 1 - i : i;
      const int token = first + row;
      const float decay = p.decays[static_cast<int64_t>(token) * p.x.heads + head];
      const float plain = holds ? static_cast<float>(value.row(token)[own]) : 0.0F;
      product *= decay;
      if (!pass.reverse) column.decay(decay);
      column.write(writes + row * kRow, plain * value.factor(token), lane);
      if (pass.output != SsdOutput::kStates) {
        const float sum = column.read(reads + row * kRow, lane);
        if (holds && lane == 0) write_output<T>(p, token, head, own, sum, plain);
      }
      if (pass.reverse) column.decay(decay);
    }
  }
  if (pass.output != SsdOutput::kStates) return;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    if (holds && row_of<kLanes>(k, lane) < pass.write.size) states[state_at(k)] = column.s[k];
  }
  if (pass.chunk_decays != nullptr && threadIdx.x == 0 && blockIdx.z == 0)
    pass.chunk_decays[blockIdx.x * p.x.heads + head] = product;
}

/// Calls run.operator()<kLanes>() with the least number of lanes for a column of that size.
template <typename Run>
void with_column_lanes(int size, Run run) {
  static_assert(kMaxSsdWidth == 16 * kOwn);
  if (size <= kOwn) return run.template operator()<1>();
  if (size <= 2 * kOwn) return run.template operator()<2>();
  if (size <= 4 * kOwn) return run.template operator()<4>();
  if (size <= 8 * kOwn) return run.template operator()<8>();
  run.template operator()<16>();
}

}  // namespace

void launch_ssd_pass(const SsdRows& x, const float* decays, const SsdPass& pass,
                     cudaStream_t stream) {
  const PassParams params = {.x = x, .pass = pass, .decays = decays};
  with_type(x.dtype, [&]<typename T>() {
    with_column_lanes(pass.write.size, [&]<int kLanes>() {
      const dim3 blocks(static_cast<unsigned>(num_ssd_chunks(x.tokens)),
                        static_cast<unsigned>(x.heads),
                        static_cast<unsigned>(divide_up(pass.value.size, kThreads / kLanes)));
      constexpr size_t kBytes = 2 * kTokens * kOwn * kLanes * sizeof(float);
      launch_early(pass_chunks<T, kLanes>, {blocks, kThreads, kBytes}, stream, params);
    });
  });
}

}  // namespace tessera::cuda
