// Attention to chosen rows, a warp for each head of a token, whose lanes share the elements of its
// rows. The gradients of keys and values are a warp's for each key-value head of a row, or where
// many query heads share it several warps': they go over the tokens that chose the row in their
// order, so that sums have the same bits every time.
#include <algorithm>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/sparse_attention/sparse_attention_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kAtOnce = 4;  // rows of the forward pass whose products are summed side by side
constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

// What a lane has of a row of `size` elements: runs of kWidth.
template <int kWidth, int kElements>
struct LaneRow {
  float at[kElements];

  __device__ void clear() {
#pragma unroll
    for (float& x : at) x = 0;
  }
  template <typename T>
  __device__ void load_from(const T* row, int size) {
#pragma unroll
    for (int s = 0; s < kElements / kWidth; ++s) {
      const int column = (s * 32 + static_cast<int>(threadIdx.x) % 32) * kWidth;
      Floats<kWidth> values{};
      if (column < size) values = load<kWidth>(row + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) at[s * kWidth + i] = values[i];
    }
  }
  template <typename T>
  __device__ void store_to(T* row, int size, float factor) const {
#pragma unroll
    for (int s = 0; s < kElements / kWidth; ++s) {
      const int column = (s * 32 + static_cast<int>(threadIdx.x) % 32) * kWidth;
      Floats<kWidth> values;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = at[s * kWidth + i] * factor;
      if (column < size) store(row + column, values);
    }
  }
  __device__ void add(float factor, const LaneRow& other) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) at[i] = fmaf(factor, other.at[i], at[i]);
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (float& x : at) x *= factor;
  }
  /// This lane's part.
  __device__ float dot(const LaneRow& other) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum = fmaf(at[i], other.at[i], sum);
    return sum;
  }
};

// One head's rows of a tensor.
template <typename T>
__device__ __forceinline__ T* head_row(T* data, int64_t row, int num_heads, int head, int size) {
  return data + (row * num_heads + head) * size;
}

template <typename T, typename Row>
__device__ __forceinline__ Row load_head(const void* data, int64_t row, int num_heads, int head,
                                         int size) {
  Row result;
  result.load_from(head_row(static_cast<const T*>(data), row, num_heads, head, size), size);
  return result;
}

// A token's query, or another of its rows that has the size of values.
template <typename T, typename Row>
__device__ __forceinline__ Row load_query(const SparseQueries& call, int64_t token, int head) {
  return load_head<T, Row>(call.q, token, call.num_heads, head, call.head_size);
}
template <typename T, typename Row>
__device__ __forceinline__ Row load_output(const SparseQueries& call, const void* data,
                                           int64_t token, int head) {
  return load_head<T, Row>(data, token, call.num_heads, head, call.head_size_v);
}

template <typename T, typename Row>
__device__ __forceinline__ Row load_key(const SparseQueries& call, int64_t row, int kv_head) {
  return load_head<T, Row>(call.k, row, call.num_kv_heads, kv_head, call.head_size);
}
template <typename T, typename Row>
__device__ __forceinline__ Row load_value(const SparseQueries& call, int64_t row, int kv_head) {
  return load_head<T, Row>(call.v, row, call.num_kv_heads, kv_head, call.head_size_v);
}

// Calls visit(row) for the rows chosen for a token, one for all lanes. Lanes load 32 at a time.
template <typename Visit>
__device__ __forceinline__ void for_each_chosen(const SparseQueries& call, int64_t token,
                                                const Visit& visit) {
  const int32_t* const chosen = call.chosen + token * call.top_k;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = 0; first < call.top_k; first += 32) {
    const int32_t own = first + lane < call.top_k ? chosen[first + lane] : -1;
    if (own >= call.num_rows) fail("a chosen row", own);
    const int count = __popc(__ballot_sync(0xFFFFFFFF, own >= 0));
    visit(own, count);
    if (count < 32) return;
  }
}

// The online softmax of a head of a token.
template <int kWidth, int kElements>
struct OnlineSoftmax {
  float max = -INFINITY;  // in units of log 2, as scores are
  float sum = 0;
  LaneRow<kWidth, kElements> o;

  // `scores` of rows of values; -inf: none.
  __device__ void add(const float (&scores)[kAtOnce],
                      const LaneRow<kWidth, kElements> (&values)[kAtOnce]) {
    float top = max;
#pragma unroll
    for (const float score : scores) top = fmaxf(top, score);
    const float rescale = exp2f(max - top);
    sum *= rescale;
    o.scale(rescale);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float prob = exp2f(scores[i] - top);
      sum += prob;
      o.add(prob, values[i]);
    }
    max = top;
  }
};

template <typename T, int kWidth, int kElements>
__global__ void __launch_bounds__(32 * kWarps)
    attend(const __grid_constant__ SparseQueries call, T* o, float* lse) {
  using Row = LaneRow<kWidth, kElements>;
  wait_for_earlier();
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t token = item / call.num_heads;
  if (token >= call.num_tokens) return;
  const int head = static_cast<int>(item % call.num_heads);
  const int kv_head = head / (call.num_heads / call.num_kv_heads);
  const float factor = call.scale * kLog2E;
  const Row q = load_query<T, Row>(call, token, head);
  OnlineSoftmax<kWidth, kElements> softmax;
  softmax.o.clear();
  for_each_chosen(call, token, [&](int32_t own, int count) {
    for (int first = 0; first < count; first += kAtOnce) {
      float scores[kAtOnce];
      Row values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t row = __shfl_sync(0xFFFFFFFF, own, min(first + i, count - 1));
        const Row key = load_key<T, Row>(call, row, kv_head);
        values[i] = load_value<T, Row>(call, row, kv_head);
        scores[i] = q.dot(key);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float score = sum_lanes(scores[i]) * factor;
        scores[i] = first + i < count ? score : -INFINITY;
        // What stands in for a row that is not there has no share, and may not be infinite either.
        if (first + i >= count) values[i].clear();
      }
      softmax.add(scores, values);
    }
  });
  softmax.o.store_to(
      head_row(o, token, call.num_heads, head, call.head_size_v), call.head_size_v,
      softmax.sum > 0 ? 1.0F / softmax.sum : (softmax.sum == 0 ? 0.0F : softmax.sum));
  if (threadIdx.x % 32 == 0) {
    lse[head * call.num_tokens + token] =
        softmax.sum == 0 ? 0.0F : softmax.max * kLn2 + logf(softmax.sum);
  }
}

// A pair's probability, and the gradient of its score.
struct PairGrad {
  float prob;
  float score;
};

__device__ __forceinline__ PairGrad differentiate(const SparseQueries& call, float score,
                                                  float grad_prob, float lse, float delta) {
  const float prob = exp2f(score * (call.scale * kLog2E) - lse * kLog2E);
  return {prob, prob * (grad_prob - delta) * call.scale};
}

template <typename T, int kWidth, int kElements>
__global__ void __launch_bounds__(32 * kWarps)
    differentiate_queries(const __grid_constant__ SparseQueries call,
                          const __grid_constant__ SparseGrads grads) {
  using Row = LaneRow<kWidth, kElements>;
  wait_for_earlier();
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t token = item / call.num_heads;
  if (token >= call.num_tokens) return;
  const int head = static_cast<int>(item % call.num_heads);
  const int kv_head = head / (call.num_heads / call.num_kv_heads);
  const int64_t of_head = head * call.num_tokens + token;
  const Row q = load_query<T, Row>(call, token, head);
  const Row o = load_output<T, Row>(call, grads.o, token, head);
  const Row grad_o = load_output<T, Row>(call, grads.grad_o, token, head);
  const float delta =
      sum_lanes(o.dot(grad_o)) - (grads.grad_lse == nullptr ? 0.0F : grads.grad_lse[of_head]);
  const float lse = grads.lse[of_head];
  if (threadIdx.x % 32 == 0) grads.delta[of_head] = delta;
  Row sum;
  sum.clear();
  for_each_chosen(call, token, [&](int32_t own, int count) {
    for (int i = 0; i < count; ++i) {
      const int64_t row = __shfl_sync(0xFFFFFFFF, own, i);
      const Row key = load_key<T, Row>(call, row, kv_head);
      const Row value = load_value<T, Row>(call, row, kv_head);
      const float score = sum_lanes(q.dot(key));
      const float grad_prob = sum_lanes(grad_o.dot(value));
      sum.add(differentiate(call, score, grad_prob, lse, delta).score, key);
    }
  });
  sum.store_to(head_row(static_cast<T*>(grads.grad_q), token, call.num_heads, head, call.head_size),
               call.head_size, 1.0F);
}

constexpr int kMarkThreads = 256;

// Bits come in any order, to the same words.
__global__ void __launch_bounds__(kMarkThreads)
    mark_choosers(const __grid_constant__ SparseQueries call, uint32_t* choosers) {
  wait_for_earlier();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kMarkThreads + threadIdx.x;
  if (i >= call.num_tokens * call.top_k) return;
  const int32_t row = call.chosen[i];
  if (row < 0) return;
  if (row >= call.num_rows) fail("a chosen row", row);
  const int64_t token = i / call.top_k;
  atomicOr(&choosers[row * divide_up(call.num_tokens, 32) + token / 32], 1U << token % 32);
}

// Calls visit(token) for the tokens that chose a row.
template <typename Visit>
__device__ __forceinline__ void for_each_chooser(const uint32_t* words, int64_t count,
                                                 const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t first = 0; first < count; first += 32) {
    const uint32_t own = first + lane < count ? words[first + lane] : 0;
    for (uint32_t lanes = __ballot_sync(0xFFFFFFFF, own != 0); lanes != 0; lanes &= lanes - 1) {
      const int from = __ffs(static_cast<int>(lanes)) - 1;
      for (uint32_t bits = __shfl_sync(0xFFFFFFFF, own, from); bits != 0; bits &= bits - 1)
        visit((first + from) * 32 + __ffs(static_cast<int>(bits)) - 1);
    }
  }
}

// Sums of the gradients of a row's key and value.
template <int kWidth, int kElements>
struct KeySums {
  using Row = LaneRow<kWidth, kElements>;
  Row key;
  Row value;

  // Adds those of the query heads from `first` on, each `step`-th, of one key-value head.
  template <typename T>
  __device__ __forceinline__ void add_heads(const SparseQueries& call, const SparseGrads& grads,
                                            int64_t row, int kv_head, int first, int step) {
    const int group = call.num_heads / call.num_kv_heads;
    const Row own_key = load_key<T, Row>(call, row, kv_head);
    const Row own_value = load_value<T, Row>(call, row, kv_head);
    key.clear();
    value.clear();
    const int64_t words = divide_up(call.num_tokens, 32);
    for_each_chooser(grads.choosers + row * words, words, [&](int64_t token) {
      for (int head = kv_head * group + first; head < (kv_head + 1) * group; head += step) {
        const Row q = load_query<T, Row>(call, token, head);
        const Row grad_o = load_output<T, Row>(call, grads.grad_o, token, head);
        const int64_t of_head = head * call.num_tokens + token;
        const float score = sum_lanes(q.dot(own_key));
        const float grad_prob = sum_lanes(grad_o.dot(own_value));
        const PairGrad pair =
            differentiate(call, score, grad_prob, grads.lse[of_head], grads.delta[of_head]);
        key.add(pair.score, q);
        value.add(pair.prob, grad_o);
      }
    });
  }
  template <typename T>
  __device__ __forceinline__ void store_to(const SparseQueries& call, T* to_key,
                                           T* to_value) const {
    key.store_to(to_key, call.head_size, 1.0F);
    value.store_to(to_value, call.head_size_v, 1.0F);
  }
};

template <typename T>
__device__ T* grad_key_row(const SparseQueries& call, const SparseGrads& grads, int64_t row,
                           int kv_head) {
  return head_row(static_cast<T*>(grads.grad_k), row, call.num_kv_heads, kv_head, call.head_size);
}
template <typename T>
__device__ T* grad_value_row(const SparseQueries& call, const SparseGrads& grads, int64_t row,
                             int kv_head) {
  return head_row(static_cast<T*>(grads.grad_v), row, call.num_kv_heads, kv_head, call.head_size_v);
}

template <typename T, int kWidth, int kElements>
__global__ void __launch_bounds__(32 * kWarps)
    differentiate_keys(const __grid_constant__ SparseQueries call,
                       const __grid_constant__ SparseGrads grads) {
  wait_for_earlier();
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t row = item / call.num_kv_heads;
  if (row >= call.num_rows) return;
  const int kv_head = static_cast<int>(item % call.num_kv_heads);
  KeySums<kWidth, kElements> sums;
  sums.template add_heads<T>(call, grads, row, kv_head, 0, 1);
  sums.store_to(call, grad_key_row<T>(call, grads, row, kv_head),
                grad_value_row<T>(call, grads, row, kv_head));
}

// Warps that share the many query heads of a key-value head, and add up in their order.
constexpr int kSharers = 8;

template <typename T, int kWidth, int kElements>
__global__ void __launch_bounds__(32 * kSharers)
    differentiate_shared_keys(const __grid_constant__ SparseQueries call,
                              const __grid_constant__ SparseGrads grads) {
  __shared__ __align__(16) float keys[kMostSparseHeadSize];
  __shared__ __align__(16) float values[kMostSparseHeadSize];
  wait_for_earlier();
  const int64_t row = blockIdx.x / call.num_kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x % call.num_kv_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  KeySums<kWidth, kElements> sums;
  sums.template add_heads<T>(call, grads, row, kv_head, warp, kSharers);
  for (int turn = 0; turn < kSharers; ++turn) {
    if (warp == turn) {
      if (turn > 0) {
        LaneRow<kWidth, kElements> before;
        before.load_from(keys, call.head_size);
        sums.key.add(1.0F, before);
        before.load_from(values, call.head_size_v);
        sums.value.add(1.0F, before);
      }
      if (turn < kSharers - 1) {
        sums.store_to(call, keys, values);
      } else {
        sums.store_to(call, grad_key_row<T>(call, grads, row, kv_head),
                      grad_value_row<T>(call, grads, row, kv_head));
      }
    }
    __syncthreads();
  }
}

// Calls run.operator()<T, kWidth, kElements>(): pairs of elements where heads have whole ones.
template <typename Run>
void with_rows(const SparseQueries& call, bool pairs, Run run) {
  const int size = std::max(call.head_size, call.head_size_v);
  with_type(call.dtype, [&]<typename T>() {
    const auto of_width = [&]<int kWidth>() {
      if (size <= 128) return run.template operator()<T, kWidth, 4>();
      if (size <= 256) return run.template operator()<T, kWidth, 8>();
      if (size <= 512) return run.template operator()<T, kWidth, 16>();
      run.template operator()<T, kWidth, 20>();
    };
    pairs ? of_width.template operator()<2>() : of_width.template operator()<1>();
  });
}

bool has_pairs(const SparseQueries& call) {
  return call.head_size % 2 == 0 && call.head_size_v % 2 == 0 &&
         are_aligned(call.q, call.k, call.v);
}

LaunchShape warps_for(int64_t items) {
  return {static_cast<unsigned>(divide_up(items, kWarps)), 32 * kWarps};
}

}  // namespace

void launch_sparse_attention(const SparseQueries& call, void* o, float* lse, cudaStream_t stream) {
  if (call.num_tokens == 0) return;
  with_rows(call, has_pairs(call) && are_aligned(o), [&]<typename T, int kWidth, int kElements>() {
    launch_early(attend<T, kWidth, kElements>, warps_for(call.num_tokens * call.num_heads), stream,
                 call, static_cast<T*>(o), lse);
  });
}

void launch_sparse_attention_backward(const SparseQueries& call, const SparseGrads& grads,
                                      cudaStream_t stream) {
  if (call.num_tokens == 0) return;
  const int64_t bytes =
      call.num_rows * divide_up(call.num_tokens, 32) * static_cast<int64_t>(sizeof(uint32_t));
  check(cudaMemsetAsync(grads.choosers, 0, bytes, stream));
  const int64_t marks = call.num_tokens * call.top_k;
  launch_early(mark_choosers, {static_cast<unsigned>(divide_up(marks, kMarkThreads)), kMarkThreads},
               stream, call, grads.choosers);
  const bool pairs = has_pairs(call) &&
                     are_aligned(grads.o, grads.grad_o, grads.grad_q, grads.grad_k, grads.grad_v);
  with_rows(call, pairs, [&]<typename T, int kWidth, int kElements>() {
    launch_early(differentiate_queries<T, kWidth, kElements>,
                 warps_for(call.num_tokens * call.num_heads), stream, call, grads);
    const int64_t rows = call.num_rows * call.num_kv_heads;
    if (call.num_heads / call.num_kv_heads >= kSharers) {
      launch_early(differentiate_shared_keys<T, kWidth, kElements>,
                   {static_cast<unsigned>(rows), 32 * kSharers}, stream, call, grads);
    } else {
      launch_early(differentiate_keys<T, kWidth, kElements>, warps_for(rows), stream, call, grads);
    }
  });
}

}  // namespace tessera::cuda
