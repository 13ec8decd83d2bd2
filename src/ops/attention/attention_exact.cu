// Attention in plain FP32 arithmetic for values and head sizes of any kind: the proofs' kernels.
//
// One kernel body, four results. Each thread block takes kBlock *rows* (queries, or for the
// gradients of keys and values, keys) and goes over all *columns* (the others) that these see, a
// tile at a time: the tile's scores, from them a factor for each pair, and the product of the
// factors with a tile of the columns' vectors, which sums up in registers. Wider vectors than
// kChunk are cut over the grid, the scores computed again for each piece.
#include <cuda_bf16.h>

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "ops/attention/attention_cuda_kernels.h"
#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx/fast_exp.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda::attention {
namespace {

enum class Result { kOutput, kGradQ, kGradK, kGradV };

constexpr int kBlock = kExactBlock;
constexpr int kDepth = 32;   // of a step of the scores
constexpr int kChunk = 128;  // values of a vector that a thread block sums up
constexpr int kThreads = 256;
constexpr int kSide = 16;              // threads along either side of a tile
constexpr int kOwn = kBlock / kSide;   // rows, and columns of scores, of a thread
constexpr int kSums = kChunk / kSide;  // columns of sums of a thread
constexpr float kLn2 = 0.6931471805599453F;

struct Shared {
  float a[kBlock][kDepth + 1];
  float b[kBlock][kDepth + 1];
  float factors[kBlock][kBlock + 1];
  float vectors[kBlock][kChunk];
};

__device__ float to_float(float value) {
  return value;
}
__device__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ void assign(float& to, float value) {
  to = value;
}
__device__ void assign(__nv_bfloat16& to, float value) {
  to = __float2bfloat16(value);
}

/// kBlock vectors of one head, of neighbouring positions; those outside the sequence read as zero.
template <typename T>
struct Vectors {
  const T* data;  // of the first one's
  int64_t stride;
  int size;
  int begin;  // the first that is there
  int end;

  __device__ float at(int row, int column) const {
    return row >= begin && row < end && column < size ? to_float(data[row * stride + column]) : 0;
  }
};

template <typename T>
__device__ Vectors<T> vectors_at(const void* matrix, int num_heads, int size, int head,
                                 int64_t first_row, int begin, int end) {
  const int64_t stride = int64_t{num_heads} * size;
  return {static_cast<const T*>(matrix) + first_row * stride + int64_t{head} * size, stride, size,
          begin, end};
}

/// products[i][j] = a row · b row, of rows kOwn ty + i and tx + kSide j.
template <typename T>
__device__ void multiply_rows(Shared& shared, const Vectors<T>& a, const Vectors<T>& b,
                              float (&products)[kOwn][kOwn]) {
  const int tx = threadIdx.x % kSide;
  const int ty = threadIdx.x / kSide;
#pragma unroll
  for (auto& row : products) {
#pragma unroll
    for (float& product : row) product = 0;
  }
  for (int depth = 0; depth < a.size; depth += kDepth) {
    __syncthreads();
    for (int i = threadIdx.x; i < kBlock * kDepth; i += kThreads) {
      const int row = i / kDepth;
      const int column = i % kDepth;
      shared.a[row][column] = a.at(row, depth + column);
      shared.b[row][column] = b.at(row, depth + column);
    }
    __syncthreads();
#pragma unroll 4
    for (int d = 0; d < kDepth; ++d) {
      float x[kOwn];
      float y[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        x[i] = shared.a[ty * kOwn + i][d];
        y[i] = shared.b[tx + kSide * i][d];
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) products[i][j] = fmaf(x[i], y[j], products[i][j]);
      }
    }
  }
}

/// sums += factors · vectors, of kChunk columns from `first` on.
template <typename T>
__device__ void add_products(Shared& shared, const Vectors<T>& vectors, int first,
                             const float (&factors)[kOwn][kOwn], float (&sums)[kOwn][kSums]) {
  const int tx = threadIdx.x % kSide;
  const int ty = threadIdx.x / kSide;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) shared.factors[ty * kOwn + i][tx + kSide * j] = factors[i][j];
  }
  for (int i = threadIdx.x; i < kBlock * kChunk; i += kThreads)
    shared.vectors[i / kChunk][i % kChunk] = vectors.at(i / kChunk, first + i % kChunk);
  __syncthreads();
#pragma unroll 4
  for (int c = 0; c < kBlock; ++c) {
    float x[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) x[i] = shared.factors[ty * kOwn + i][c];
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const float y = shared.vectors[c][tx + kSide * j];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) sums[i][j] = fmaf(x[i], y, sums[i][j]);
    }
  }
}

/// Queries of a sequence in neighbouring rows.
struct Span {
  int row;  ///< of position 0
  int begin;
  int end;
};

__device__ bool is_visible(const Span& queries, int window, int query, int key) {
  return key <= query && query >= queries.begin && query < queries.end &&
         (window == 0 || query - key < window);
}

/// The first key that a query sees.
__device__ int first_seen(const Heads& heads, int query) {
  if (heads.chunk > 0) return query / heads.chunk * heads.chunk;
  return heads.window == 0 ? 0 : max(0, query - heads.window + 1);
}

/// Over the kSide threads that share rows.
template <typename Combine>
__device__ float reduce(float value, const Combine& combine) {
#pragma unroll
  for (int step = 1; step < kSide; step *= 2)
    value = combine(value, __shfl_xor_sync(~0U, value, step));
  return value;
}

/// What the forward knows of a thread's rows: the greatest score so far, in units of log 2, and the
/// sum of exponentials.
struct Softmax {
  float max[kOwn];
  float sum[kOwn];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      max[i] = -FLT_MAX;
      sum[i] = 0;
    }
  }
  /// Scores, those not visible being minus infinity, become probabilities relative to the present
  /// max.
  __device__ void add(float (&scores)[kOwn][kOwn], float (&sums)[kOwn][kSums]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float tile_max = -FLT_MAX;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) tile_max = fmaxf(tile_max, scores[i][j]);
      tile_max = reduce(tile_max, [](float a, float b) { return fmaxf(a, b); });
      const float now = fmaxf(max[i], tile_max);
      const float rescale = exp2f(max[i] - now);
      float tile_sum = 0;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        scores[i][j] = exp2f(scores[i][j] - now);
        tile_sum += scores[i][j];
      }
      tile_sum = reduce(tile_sum, [](float a, float b) { return a + b; });
      sum[i] = sum[i] * rescale + tile_sum;
      max[i] = now;
#pragma unroll
      for (int j = 0; j < kSums; ++j) sums[i][j] *= rescale;
    }
  }
};

/// One thread block's work: the rows of an item, of one head of the rows.
template <typename T, Result kResult, bool kRing>
struct Worker {
  static constexpr bool kByKeys = kResult == Result::kGradK || kResult == Result::kGradV;
  static constexpr bool kSeveralSpans = kByKeys && kRing;

  const ExactParams& params;
  const Item item;
  Span span;  ///< of the queries in hand
  Shared& shared;
  int row_head;  // of the keys where kByKeys
  int chunk;     // first of the columns summed up

  __device__ int width() const {
    return kResult == Result::kGradQ || kResult == Result::kGradK ? params.heads.head_size
                                                                  : params.heads.head_size_v;
  }
  __device__ Vectors<T> queries(const void* matrix, int size, int head, int position) const {
    const int begin = max(-span.row, span.begin) - position;
    return vectors_at<T>(matrix, params.heads.num_heads, size, head, int64_t{span.row} + position,
                         max(0, begin), span.end - position);
  }
  __device__ Vectors<T> keys(const void* matrix, int size, int head, int position) const {
    return vectors_at<T>(matrix, params.heads.num_kv_heads, size, head,
                         int64_t{item.key_row} + position, 0, item.length - position);
  }

  /// The factors of the pairs of a query block and a key block; a thread's are at [i][j] for row
  /// kOwn ty + i and column tx + kSide j.
  __device__ void compute_factors(int head, int query, int key, Softmax& softmax,
                                  float (&factors)[kOwn][kOwn], float (&sums)[kOwn][kSums]) const {
    const Heads& heads = params.heads;
    const int kv_head = head / (heads.num_heads / heads.num_kv_heads);
    const auto q = queries(params.q, heads.head_size, head, query);
    const auto k = keys(params.k, heads.head_size, kv_head, key);
    multiply_rows(shared, kByKeys ? k : q, kByKeys ? q : k, factors);
    const float to_log2 = heads.scale * kLog2E;
    const auto each = [&](const auto& visit) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          const int row = threadIdx.x / kSide * kOwn + i;
          const int column = threadIdx.x % kSide + kSide * j;
          visit(i, j, query + (kByKeys ? column : row), key + (kByKeys ? row : column));
        }
      }
    };
    if constexpr (kResult == Result::kOutput) {
      each([&](int i, int j, int at_query, int at_key) {
        const bool visible = is_visible(span, heads.window, at_query, at_key) &&
                             (heads.chunk == 0 || at_key >= first_seen(heads, at_query));
        factors[i][j] = visible ? factors[i][j] * to_log2 : -INFINITY;
      });
      softmax.add(factors, sums);
      return;
    }
    const int64_t first_sum = int64_t{head} * heads.num_rows + span.row;
    each([&](int i, int j, int at_query, int at_key) {
      factors[i][j] =
          is_visible(span, heads.window, at_query, at_key)
              ? exp2f(factors[i][j] * to_log2 - params.lse[first_sum + at_query] * kLog2E)
              : 0;
    });
    if constexpr (kResult == Result::kGradV) return;
    float grads[kOwn][kOwn];
    const auto grad_o = queries(params.grad_o, heads.head_size_v, head, query);
    const auto v = keys(params.v, heads.head_size_v, kv_head, key);
    multiply_rows(shared, kByKeys ? v : grad_o, kByKeys ? grad_o : v, grads);
    each([&](int i, int j, int at_query, int at_key) {
      if (is_visible(span, heads.window, at_query, at_key))
        factors[i][j] *= (grads[i][j] - params.delta[first_sum + at_query]) * heads.scale;
    });
  }

  __device__ void run_tile(int head, int query, int key, Softmax& softmax,
                           float (&sums)[kOwn][kSums]) const {
    const Heads& heads = params.heads;
    float factors[kOwn][kOwn];
    compute_factors(head, query, key, softmax, factors, sums);
    const int kv_head = head / (heads.num_heads / heads.num_kv_heads);
    const Vectors<T> vectors =
        kResult == Result::kOutput  ? keys(params.v, heads.head_size_v, kv_head, key)
        : kResult == Result::kGradQ ? keys(params.k, heads.head_size, kv_head, key)
        : kResult == Result::kGradK ? queries(params.q, heads.head_size, head, query)
                                    : queries(params.grad_o, heads.head_size_v, head, query);
    add_products(shared, vectors, chunk, factors, sums);
  }

  /// The queries that are there of the item's sequence: with a ring those of one run.
  __device__ Span span_at(int idx) const {
    if constexpr (!kSeveralSpans) return {item.query_row, item.begin, item.length};
    const int run_begin = params.ring.run_begin(idx) - item.key_row;  // a position
    return {idx * params.ring.chunk - run_begin, max(run_begin, 0),
            min(run_begin + params.ring.chunk, item.length)};
  }

  __device__ void run() {
    const int window = params.heads.window;
    const int group = params.heads.num_heads / params.heads.num_kv_heads;
    float sums[kOwn][kSums] = {};
    Softmax softmax;
    softmax.clear();
    if constexpr (kByKeys) {
      for (int idx = 0; idx < (kSeveralSpans ? params.ring.num_runs : 1); ++idx) {
        span = span_at(idx);
        const int begin = max(item.first, span.begin);
        const int end = window == 0 ? span.end : min(span.end, item.first + kBlock - 1 + window);
        for (int head = row_head * group; head < (row_head + 1) * group; ++head) {
          for (int query = begin / kBlock * kBlock; begin < end && query < end; query += kBlock)
            run_tile(head, query, item.first, softmax, sums);
        }
      }
    } else {
      span = span_at(0);
      const int seen = first_seen(params.heads, item.first);
      const int end = min(item.length, item.first + kBlock);
      for (int key = seen / kBlock * kBlock; key < end; key += kBlock)
        run_tile(row_head, item.first, key, softmax, sums);
    }
    store(softmax, sums);
  }

  __device__ void store(const Softmax& softmax, const float (&sums)[kOwn][kSums]) const {
    using Out = std::conditional_t<kSeveralSpans, float, T>;
    const Heads& heads = params.heads;
    const int num_heads = kByKeys ? heads.num_kv_heads : heads.num_heads;
    void* const result = kResult == Result::kOutput  ? params.o
                         : kResult == Result::kGradQ ? params.grad_q
                         : kResult == Result::kGradK ? params.grad_k
                                                     : params.grad_v;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int position = item.first + static_cast<int>(threadIdx.x) / kSide * kOwn + i;
      if (position >= item.length || (!kByKeys && position < item.begin)) continue;
      const int token = (kByKeys ? item.key_row : item.query_row) + position;
      const int64_t row = kSeveralSpans ? params.ring.gathered_row(token) : token;
      const float factor = kResult == Result::kOutput ? 1 / softmax.sum[i] : 1;
      Out* const to = static_cast<Out*>(result) + (row * num_heads + row_head) * width();
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        const int column = chunk + threadIdx.x % kSide + kSide * j;
        if (column < width()) assign(to[column], sums[i][j] * factor);
      }
      if (kResult == Result::kOutput && params.lse != nullptr && chunk == 0 &&
          threadIdx.x % kSide == 0)
        params.lse[row_head * heads.num_rows + row] = softmax.max[i] * kLn2 + logf(softmax.sum[i]);
    }
  }
};

template <typename T, Result kResult, bool kRing>
__global__ void __launch_bounds__(kThreads) exact_kernel(ExactParams params) {
  wait_for_earlier();
  extern __shared__ __align__(16) unsigned char memory[];
  using Own = Worker<T, kResult, kRing>;
  const int num_heads = Own::kByKeys ? params.heads.num_kv_heads : params.heads.num_heads;
  const int at = static_cast<int>(blockIdx.x) / num_heads;
  if (at >= *params.list.num_items) return;
  // Keys that are first in their sequence are seen by most queries: the list's order reversed.
  Item item = params.list.items[at];
  if (Own::kByKeys) item.first = item.num_after * kBlock;
  Own worker{params,
             item,
             {},
             *reinterpret_cast<Shared*>(memory),
             static_cast<int>(blockIdx.x) % num_heads,
             static_cast<int>(blockIdx.y) * kChunk};
  worker.run();
}

template <typename T, Result kResult, bool kRing = false>
void launch(const ExactParams& params, int num_heads, int width, cudaStream_t stream) {
  const auto kernel = exact_kernel<T, kResult, kRing>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  const dim3 grid(static_cast<unsigned>(params.list.capacity * num_heads),
                  static_cast<unsigned>((width + kChunk - 1) / kChunk));
  launch_early(kernel, {grid, kThreads, sizeof(Shared)}, stream, params);
}

template <typename T, bool kRing>
void launch_by_keys(const ExactParams& params, cudaStream_t stream) {
  const Heads& heads = params.heads;
  launch<T, Result::kGradK, kRing>(params, heads.num_kv_heads, heads.head_size, stream);
  launch<T, Result::kGradV, kRing>(params, heads.num_kv_heads, heads.head_size_v, stream);
}

}  // namespace

void launch_exact_forward(const ExactParams& params, DType dtype, cudaStream_t stream) {
  with_type(dtype, [&]<typename T>() {
    launch<T, Result::kOutput>(params, params.heads.num_heads, params.heads.head_size_v, stream);
  });
}

void launch_exact_query_grad(const ExactParams& params, DType dtype, cudaStream_t stream) {
  with_type(dtype, [&]<typename T>() {
    launch<T, Result::kGradQ>(params, params.heads.num_heads, params.heads.head_size, stream);
  });
}

void launch_exact_key_grads(const ExactParams& params, DType dtype, cudaStream_t stream) {
  with_type(dtype, [&]<typename T>() {
    params.ring.num_runs > 0 ? launch_by_keys<T, true>(params, stream)
                             : launch_by_keys<T, false>(params, stream);
  });
}

}  // namespace tessera::cuda::attention
