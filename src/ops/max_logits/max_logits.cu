#include <cfloat>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/max_logits/max_logits_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;                 // queries, and keys, of a block's tile
constexpr int kDepth = 32;                // of a head's elements at a time
constexpr int kSide = 16;                 // threads along each side of a tile
constexpr int kOfThread = kTile / kSide;  // rows, and columns, of a thread
constexpr int kPitch = kTile + 1;         // keeps the stores of a warp in different banks
constexpr float kNone = -FLT_MAX;

/// Keys first <= token < end are what a query sees that is looked at; none where it is not.
struct Visible {
  int64_t first;
  int64_t end;
};

struct Shared {
  float q[kDepth][kPitch];
  float k[kDepth][kPitch];
  Visible visible[kTile];
  float largest[kThreads / 32];
};

/// Where the sequence of a token begins; -1 where no sequence has it.
__device__ int64_t sequence_begin(const MaxLogitsCall& call, int64_t token) {
  int sequence = 0;
  for (int end = call.num_sequences + 1; end - sequence > 1;) {
    const int middle = (sequence + end) / 2;
    (call.cu_seqlens[middle] <= token ? sequence : end) = middle;
  }
  const int64_t begin = call.cu_seqlens[sequence];
  return token < begin || token >= call.cu_seqlens[call.num_sequences] ? -1 : begin;
}

/// Finds what the block's queries see, and returns what of the result is known without their keys.
__device__ float find_visible(const MaxLogitsCall& call, int64_t first_query, int head,
                              Shared& shared) {
  if (threadIdx.x >= kTile) return kNone;
  Visible& visible = shared.visible[threadIdx.x];
  visible = {0, 0};
  const int64_t row = first_query + threadIdx.x;
  if (row >= call.num_queries) return kNone;
  const int64_t token = call.rows.token_of_query(row);
  const int64_t begin = sequence_begin(call, token);
  if (begin < 0) return kNone;
  const float lse = call.lse[head * call.num_queries + row];
  if (!(lse > call.limit)) return lse;
  visible.end = token + 1;
  visible.first = call.window > 0 ? max(begin, token - call.window + 1) : begin;
  return kNone;
}

/// Elements `depth` and following of 64 rows of one head, transposed.
template <typename T, typename RowOf>
__device__ void load_tile(const T* from, int64_t row_elements, int depth, int head_size,
                          float (&to)[kDepth][kPitch], RowOf row_of) {
  for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
    const int element = depth + i % kDepth;
    const int64_t row = row_of(i / kDepth);
    const bool there = row >= 0 && element < head_size;
    to[i % kDepth][i / kDepth] =
        there ? static_cast<float>(from[row * row_elements + element]) : 0.0F;
  }
}

/// The largest product of a query and a visible key that this thread has, of the keys
/// first_key .. first_key + 63.
template <typename T>
__device__ float largest_of_tile(const MaxLogitsCall& call, int64_t first_query, int64_t first_key,
                                 int head, int64_t end_key, Shared& shared) {
  const int size = call.head_size;
  const int kv_head = head / (call.heads / call.kv_heads);
  const T* const q = static_cast<const T*>(call.q) + int64_t{head} * size;
  const T* const k = static_cast<const T*>(call.k) + int64_t{kv_head} * size;
  const int row = threadIdx.x / kSide * kOfThread;
  const int column = threadIdx.x % kSide * kOfThread;
  float sums[kOfThread][kOfThread] = {};
  for (int depth = 0; depth < size; depth += kDepth) {
    __syncthreads();
    load_tile(q, int64_t{call.heads} * size, depth, size, shared.q, [&](int i) {
      return first_query + i < call.num_queries ? first_query + i : int64_t{-1};
    });
    load_tile(k, int64_t{call.kv_heads} * size, depth, size, shared.k, [&](int i) {
      return first_key + i < end_key ? call.rows.row_of_key(first_key + i) : int64_t{-1};
    });
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int r = 0; r < kOfThread; ++r)
#pragma unroll
        for (int c = 0; c < kOfThread; ++c)
          sums[r][c] = fmaf(shared.q[d][row + r], shared.k[d][column + c], sums[r][c]);
    }
  }
  float largest = kNone;
#pragma unroll
  for (int r = 0; r < kOfThread; ++r) {
    const Visible visible = shared.visible[row + r];
#pragma unroll
    for (int c = 0; c < kOfThread; ++c) {
      const int64_t key = first_key + column + c;
      if (key >= visible.first && key < visible.end) largest = fmaxf(largest, sums[r][c]);
    }
  }
  return largest;
}

/// The block's largest value, in thread 0.
__device__ float largest_of_block(float value, Shared& shared) {
  for (int step = 16; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffU, value, step));
  if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) value = fmaxf(value, shared.largest[warp]);
  return value;
}

/// A block has 64 queries of a head. Where none of them is looked at, it reads their statistics
/// alone.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    part_kernel(const __grid_constant__ MaxLogitsCall call) {
  __shared__ Shared shared;
  wait_for_earlier();
  const int64_t first_query = int64_t{blockIdx.x} * kTile;
  const int head = static_cast<int>(blockIdx.y);
  float value = find_visible(call, first_query, head, shared);
  const bool looks = threadIdx.x < kTile && shared.visible[threadIdx.x].end > 0;
  if (__syncthreads_or(looks) != 0) {
    int64_t first = INT64_MAX;
    int64_t end = 0;
    for (const Visible& visible : shared.visible) {
      if (visible.end == 0) continue;
      first = min(first, visible.first);
      end = max(end, visible.end);
    }
    float largest = kNone;
    for (int64_t key = first; key < end; key += kTile)
      largest = fmaxf(largest, largest_of_tile<T>(call, first_query, key, head, end, shared));
    if (largest > kNone) value = fmaxf(value, largest * call.scale);
  }
  value = largest_of_block(value, shared);
  if (threadIdx.x == 0) call.partial[head * gridDim.x + blockIdx.x] = value;
}

/// A block has a head.
__global__ void __launch_bounds__(kThreads)
    join_kernel(const float* partial, int64_t num_parts, float* result) {
  __shared__ Shared shared;
  wait_for_earlier();
  float value = kNone;
  for (int64_t i = threadIdx.x; i < num_parts; i += kThreads)
    value = fmaxf(value, partial[blockIdx.x * num_parts + i]);
  value = largest_of_block(value, shared);
  if (threadIdx.x == 0) result[blockIdx.x] = value;
}

}  // namespace

int64_t num_logit_parts(int64_t num_queries) {
  return divide_up(num_queries, kTile);
}

void launch_max_logits(const MaxLogitsCall& call, cudaStream_t stream) {
  const int64_t parts = num_logit_parts(call.num_queries);
  const auto heads = static_cast<unsigned>(call.heads);
  if (parts > 0) {
    with_type(call.dtype, [&]<typename T>() {
      launch_early(part_kernel<T>, {dim3(static_cast<unsigned>(parts), heads), kThreads}, stream,
                   call);
    });
  }
  launch_early(join_kernel, {heads, kThreads}, stream, call.partial, parts, call.result);
}

}  // namespace tessera::cuda
