// The softmax of the head's logits: a block takes a row, finds its maximum and sum in one reading
// and writes the gradients over the logits in a second one, which finds them in the L2 cache. Of a
// row that is one tile, the threads keep what they read.
#include <cuda_bf16.h>

#include "ops/cuda/column_sums.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx/fast_exp.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/linear_cross_entropy/head_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 512;
/// With two blocks to a processor, the rows under way fit in the L2 cache up to vocabularies of
/// some 40,000, and enough reads are in flight.
constexpr int kReadBlocksPerProcessor = 2;
/// Rows that are read once need no cache.
constexpr int kKeptBlocksPerProcessor = 3;
constexpr int kVectors = 4;  // of four values each, that a thread has in flight
constexpr int kStep = kThreads * 4;
constexpr int kTile = kStep * kVectors;

using Bf16 = __nv_bfloat16;

/// exp(x - shift). BF16 inputs have errors that hide those of the fast exponential.
template <typename T>
__device__ __forceinline__ float shifted_exp(float x, float shift) {
  if constexpr (sizeof(T) == 2) {
    return fast_exp2((x - shift) * kLog2E);
  } else {
    return expf(x - shift);
  }
}

/// The sum of exp(x - maximum) over some values.
struct Statistics {
  float maximum = -INFINITY;
  float sum = 0;

  /// Nothing has no maximum that could be subtracted.
  __device__ float sum_at(float other) const {
    return maximum == -INFINITY ? sum : sum * expf(maximum - other);
  }
  __device__ void join(const Statistics& other) {
    const float joint = fmaxf(maximum, other.maximum);
    sum = sum_at(joint) + other.sum_at(joint);
    maximum = joint;
  }
};

__device__ __forceinline__ Statistics shuffled(const Statistics& own, int mask) {
  return {__shfl_xor_sync(~0U, own.maximum, mask), __shfl_xor_sync(~0U, own.sum, mask)};
}

/// Joined over the block, the same in all its threads.
__device__ Statistics join_block(Statistics own) {
  __shared__ Statistics of_warps[kThreads / kWarp];
  for (int mask = 1; mask < kWarp; mask *= 2) own.join(shuffled(own, mask));
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = own;
  __syncthreads();
  Statistics joint;
  for (const Statistics& warp : of_warps) joint.join(warp);
  return joint;
}

/// A thread's part of a tile of a row: vectors a step apart; -inf beyond the row's end.
struct Part {
  float4 vectors[kVectors];

  static __device__ __forceinline__ int column(int tile, int i) {
    return tile + i * kStep + static_cast<int>(threadIdx.x) * 4;
  }
  __device__ __forceinline__ void load(const float* row, int tile, int num_columns) {
    if (tile + kTile <= num_columns) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        vectors[i] = *reinterpret_cast<const float4*>(row + column(tile, i));
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) vectors[i] = load_end(row, column(tile, i), num_columns);
    }
  }
  static __device__ __forceinline__ float4 load_end(const float* row, int at, int num_columns) {
    float4 v{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    if (at < num_columns) v = *reinterpret_cast<const float4*>(row + at);
    if (at + 1 >= num_columns) v.y = -INFINITY;
    if (at + 2 >= num_columns) v.z = -INFINITY;
    if (at + 3 >= num_columns) v.w = -INFINITY;
    return v;
  }
  __device__ __forceinline__ float maximum() const {
    float result = -INFINITY;
#pragma unroll
    for (const float4& v : vectors) result = fmaxf(result, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
    return result;
  }
};

/// A row of logits that is read as often as it is asked for.
struct ReadRow {
  static constexpr bool kIsKept = false;

  const float* row;
  int num_columns;

  /// Calls run(tile, part) for every tile, while the next one is on its way.
  template <typename Run>
  __device__ __forceinline__ void for_each_tile(const Run& run) const {
    Part part;
    part.load(row, 0, num_columns);
    for (int tile = 0; tile < num_columns; tile += kTile) {
      Part next;
      if (num_columns - tile > kTile) next.load(row, tile + kTile, num_columns);
      run(tile, part);
      part = next;
    }
  }
};

/// A row of one tile, which was read once.
struct KeptRow {
  static constexpr bool kIsKept = true;

  int num_columns;
  Part part;

  __device__ __forceinline__ KeptRow(const float* row, int num_columns) : num_columns(num_columns) {
    part.load(row, 0, num_columns);
  }
  template <typename Run>
  __device__ __forceinline__ void for_each_tile(const Run& run) const {
    run(0, part);
  }
};

template <typename Row>
constexpr int blocks_per_processor =
    Row::kIsKept ? kKeptBlocksPerProcessor : kReadBlocksPerProcessor;

template <typename T, typename Row>
__device__ Statistics row_statistics(const Row& row) {
  const int num_columns = row.num_columns;
  Statistics own;
  row.for_each_tile([&](int tile, const Part& part) {
    const float maximum = fmaxf(own.maximum, part.maximum());
    float sum = own.sum_at(maximum);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (Part::column(tile, i) >= num_columns) continue;  // nothing has no maximum
      const float4 v = part.vectors[i];
      sum += (shifted_exp<T>(v.x, maximum) + shifted_exp<T>(v.y, maximum)) +
             (shifted_exp<T>(v.z, maximum) + shifted_exp<T>(v.w, maximum));
    }
    own = {maximum, sum};
  });
  return join_block(own);
}

__device__ __forceinline__ void store(float* to, const float4& v) {
  *reinterpret_cast<float4*>(to) = v;
}
__device__ __forceinline__ void store(Bf16* to, const float4& v) {
  const __nv_bfloat162 pairs[] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
}

/// A token's label.
struct Label {
  bool ignored;
  bool valid;
  int64_t column;  ///< among the columns that are here, or -1
};

__device__ Label label_of(const HeadRows& rows, int64_t token) {
  const int64_t label = rows.labels[token];
  const int64_t column = label - rows.first_column;
  const bool inside = label >= 0 && label < rows.vocab_size;
  const bool ignored = label == rows.ignored;
  const bool here = inside && !ignored && column >= 0 && column < rows.num_columns;
  return {ignored, inside || ignored, here ? column : -1};
}

struct RowGradient {
  float lse = 0;
  float coef = 0;
  float at_label = 0;
  int64_t label_column = -1;
};

__device__ RowGradient row_gradient(const HeadGradients& g, int64_t token, const Label& label,
                                    float lse) {
  RowGradient row{.lse = lse, .label_column = label.column};
  if (!label.valid) {
    row.coef = NAN;
  } else if (g.grad_lse != nullptr) {
    row.coef = g.grad_lse[token];
    row.at_label = g.grad_label_logit[token];
  } else if (!label.ignored) {
    row.coef = *g.scale * (g.grad_loss != nullptr ? *g.grad_loss : 1.0F);
    if (g.token_weights != nullptr) row.coef *= g.token_weights[token];
    row.at_label = -row.coef;
  }
  return row;
}

template <typename T>
__device__ void store_zeros(T* row, int num_columns) {
  for (int at = static_cast<int>(threadIdx.x) * 4; at < num_columns; at += kStep)
    store(row + at, float4{});
}

/// The thread that stores a column.
__device__ __forceinline__ int owner_of(int column) {
  return column / 4 % kThreads;
}

/// What a change of a product is to the logit that it was capped to, of 1 / c.
template <bool kCapped>
__device__ __forceinline__ float slope_at(float logit, float inverse_cap) {
  if constexpr (!kCapped) return 1.0F;
  const float share = logit * inverse_cap;
  return 1.0F - share * share;
}

__device__ __forceinline__ bool owns(int64_t column) {
  return column >= 0 && owner_of(static_cast<int>(column)) == static_cast<int>(threadIdx.x);
}

/// Over the logits. Gradients are no wider: a tile is written where all threads have read.
/// `label_logit`: in the thread that owns the label's column.
template <typename T, bool kCapped, typename Row>
__device__ void store_gradients(const Row& row, T* to, const RowGradient& gradient,
                                float label_logit, float inverse_cap) {
  const int num_columns = row.num_columns;
  if (gradient.coef == 0 && gradient.at_label == 0) return store_zeros(to, num_columns);
  const auto probability = [&](float logit) {
    return shifted_exp<T>(logit, gradient.lse) * gradient.coef;
  };
  const auto own = [&](float logit) {
    if constexpr (!kCapped) return probability(logit);
    return probability(logit) * slope_at<kCapped>(logit, inverse_cap);
  };
  row.for_each_tile([&](int tile, const Part& part) {
    if constexpr (sizeof(T) < sizeof(float) && !Row::kIsKept) __syncthreads();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = Part::column(tile, i);
      const float4 v = part.vectors[i];
      if (at < num_columns) store(to + at, {own(v.x), own(v.y), own(v.z), own(v.w)});
    }
  });
  if (!owns(gradient.label_column)) return;
  const float sum = probability(label_logit) + gradient.at_label;
  to[gradient.label_column] = T(sum * slope_at<kCapped>(label_logit, inverse_cap));
}

/// Finds a row's losses; returns its lse to all threads.
template <typename T, typename Row>
__device__ float find_losses(const HeadLosses& losses, const float* logits, const Row& row,
                             int64_t token, const Label& label) {
  float label_logit = 0;
  if (threadIdx.x == 0 && label.column >= 0) label_logit = logits[label.column];
  const Statistics statistics = row_statistics<T>(row);
  const float log_sum = logf(statistics.sum);
  const float lse = statistics.maximum + log_sum;
  if (threadIdx.x == 0) {
    if (!label.valid) label_logit = NAN;
    if (losses.lse != nullptr) losses.lse[token] = lse;
    if (losses.label_logit != nullptr) losses.label_logit[token] = label_logit;
    if (losses.token_loss != nullptr)
      losses.token_loss[token] = label.ignored ? 0.0F : statistics.maximum - label_logit + log_sum;
  }
  return lse;
}

template <typename T, bool kLosses, bool kGradients, bool kCapped, typename Row>
__global__ void __launch_bounds__(kThreads, blocks_per_processor<Row>)
    head_kernel(const HeadRows rows, const HeadLosses losses, const HeadGradients gradients) {
  wait_for_earlier();
  let_next_begin_if_short();
  float* const logits = rows.logits + blockIdx.x * rows.stride;
  const auto num_columns = static_cast<int>(rows.num_columns);
  const int64_t token = rows.first_token + blockIdx.x;
  if (rows.extent != nullptr && token >= *rows.extent) {
    if constexpr (kGradients) store_zeros(reinterpret_cast<T*>(logits), num_columns);
    return;
  }
  const Label label = label_of(rows, token);
  const float own_label_logit = owns(label.column) ? logits[label.column] : 0.0F;
  const Row row{logits, num_columns};
  float lse = 0;
  if constexpr (kLosses) {
    lse = find_losses<T>(losses, logits, row, token, label);
  } else {
    lse = gradients.lse[token];
  }
  if constexpr (kGradients)
    store_gradients<T, kCapped>(row, reinterpret_cast<T*>(logits),
                                row_gradient(gradients, token, label, lse), own_label_logit,
                                1.0F / rows.softcap);
}

template <bool kLosses, bool kGradients, bool kCapped, typename Row>
void launch_rows(const HeadRows& rows, const HeadLosses& losses, const HeadGradients& gradients,
                 cudaStream_t stream) {
  const auto kernel = rows.dtype == DType::kF32
                          ? head_kernel<float, kLosses, kGradients, kCapped, Row>
                          : head_kernel<Bf16, kLosses, kGradients, kCapped, Row>;
  launch_early(kernel, {static_cast<unsigned>(rows.num_rows), kThreads}, stream, rows, losses,
               gradients);
}

/// Only where losses and gradients are found at once is a row read twice.
template <bool kLosses, bool kGradients, bool kCapped>
void launch_kernel(const HeadRows& rows, const HeadLosses& losses, const HeadGradients& gradients,
                   cudaStream_t stream) {
  if constexpr (kLosses && kGradients) {
    if (rows.num_columns <= kTile)
      return launch_rows<true, true, kCapped, KeptRow>(rows, losses, gradients, stream);
  }
  launch_rows<kLosses, kGradients, kCapped, ReadRow>(rows, losses, gradients, stream);
}

/// Losses alone are the same of logits that were capped.
template <bool kLosses, bool kGradients>
void launch(const HeadRows& rows, const HeadLosses& losses, const HeadGradients& gradients,
            cudaStream_t stream) {
  if (rows.num_rows == 0) return;
  if (kGradients && rows.softcap > 0) {
    launch_kernel<kLosses, kGradients, kGradients>(rows, losses, gradients, stream);
  } else {
    launch_kernel<kLosses, kGradients, false>(rows, losses, gradients, stream);
  }
}

/// Of columns `at` to at + 3, of which those beyond the row's end have none.
__device__ __forceinline__ float4 bias_at(const HeadRows& rows, int64_t at) {
  float4 bias{};
  if (rows.bias == nullptr) return bias;
  bias.x = rows.bias[at];
  if (at + 1 < rows.num_columns) bias.y = rows.bias[at + 1];
  if (at + 2 < rows.num_columns) bias.z = rows.bias[at + 2];
  if (at + 3 < rows.num_columns) bias.w = rows.bias[at + 3];
  return bias;
}

__global__ void __launch_bounds__(kThreads) finish_logits_kernel(const HeadRows rows) {
  wait_for_earlier();
  let_next_begin_if_short();
  float* const row = rows.logits + blockIdx.x * rows.stride;
  const bool caps = rows.softcap > 0;
  const float inverse = caps ? 1.0F / rows.softcap : 0.0F;
  const auto finished = [&](float x) { return caps ? rows.softcap * tanhf(x * inverse) : x; };
  for (int64_t at = threadIdx.x * 4; at < rows.num_columns; at += kStep) {
    float4* const values = reinterpret_cast<float4*>(row + at);
    const float4 v = *values;
    const float4 bias = bias_at(rows, at);
    *values = {finished(v.x + bias.x), finished(v.y + bias.y), finished(v.z + bias.z),
               finished(v.w + bias.w)};
  }
}

/// The gradients of logits, in rows `stride` elements apart, which have room for whole vectors.
template <typename T, int kWidth>
struct LogitGradients {
  using Loaded = Pack<T, kWidth>;

  const T* rows;
  int64_t stride;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return load_pack<kWidth>(rows + row * stride + column);
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<kWidth>& sums) const {
    const Floats<kWidth> terms = to_floats(loaded);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] += terms[i];
  }
};

constexpr int kSumThreads = 1024;

__global__ void __launch_bounds__(kSumThreads) sum_losses_kernel(const LossSum all) {
  wait_for_earlier();
  let_next_begin_if_short();
  __shared__ double sums[kSumThreads];
  const int64_t end = all.extent != nullptr ? *all.extent : all.num_tokens;
  double sum = 0;
  for (int64_t t = threadIdx.x; t < end; t += kSumThreads) {
    const double loss = all.token_loss[t];
    sum += all.token_weights != nullptr ? double{all.token_weights[t]} * loss : loss;
  }
  sums[threadIdx.x] = sum;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *all.loss = static_cast<float>(*all.scale * sums[0]);
}

template <typename T>
__global__ void copy_rows_kernel(const HeadCopy copy) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t width = copy.row_bytes / static_cast<int64_t>(sizeof(T));
  const int64_t token = copy.first_token + blockIdx.x;
  const T* const from = static_cast<const T*>(copy.from) + token * width;
  T* const to = static_cast<T*>(copy.to) + blockIdx.x * width;
  const bool counts = token < *copy.extent;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) to[i] = counts ? from[i] : T{};
}

}  // namespace

void launch_head_finish(const HeadRows& rows, cudaStream_t stream) {
  if (rows.num_rows == 0) return;
  launch_early(finish_logits_kernel, {static_cast<unsigned>(rows.num_rows), kThreads}, stream,
               rows);
}

void launch_head_bias_gradient(const HeadRows& rows, Accumulator accumulator, float* partials,
                               int num_sms, cudaStream_t stream) {
  with_type(rows.dtype, [&]<typename T>() {
    constexpr int kWidth = kVectorWidth<T>;
    constexpr int64_t kWords = sizeof(float) / sizeof(T);
    launch_sum_columns<kWidth>(
        LogitGradients<T, kWidth>{reinterpret_cast<const T*>(rows.logits), rows.stride * kWords},
        {.bound = rows.num_rows}, rows.num_columns, accumulator, partials, num_sms, stream);
  });
}

void launch_head_losses(const HeadRows& rows, const HeadLosses& losses, cudaStream_t stream) {
  launch<true, false>(rows, losses, {}, stream);
}

void launch_head_gradients(const HeadRows& rows, const HeadGradients& gradients,
                           cudaStream_t stream) {
  launch<false, true>(rows, {}, gradients, stream);
}

void launch_head_fused(const HeadRows& rows, const HeadLosses& losses,
                       const HeadGradients& gradients, cudaStream_t stream) {
  launch<true, true>(rows, losses, gradients, stream);
}

void launch_sum_losses(const LossSum& sum, cudaStream_t stream) {
  launch_early(sum_losses_kernel, {1, kSumThreads}, stream, sum);
}

void launch_copy_rows(const HeadCopy& copy, cudaStream_t stream) {
  if (copy.num_rows == 0 || copy.row_bytes == 0) return;
  const auto addresses =
      reinterpret_cast<uintptr_t>(copy.from) | reinterpret_cast<uintptr_t>(copy.to);
  const bool vectors = (addresses | static_cast<uintptr_t>(copy.row_bytes)) % sizeof(uint4) == 0;
  const auto kernel = vectors ? copy_rows_kernel<uint4> : copy_rows_kernel<uint16_t>;
  launch_early(kernel, {static_cast<unsigned>(copy.num_rows), 256}, stream, copy);
}

}  // namespace tessera::cuda
