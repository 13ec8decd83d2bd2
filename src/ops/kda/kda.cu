// Forward: decays and comparisons of keys of all chunks at once, then the states from chunk to
// chunk, 64 columns of values of a head by a block.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx/fast_exp.cuh"
#include "ops/kda/kda_place.cuh"

namespace tessera::cuda {
namespace {

constexpr int kDecayThreads = 128;

/// A thread takes an element of a chunk's keys.
template <typename T>
__global__ void __launch_bounds__(kDecayThreads)
    decay_keys(const __grid_constant__ DeltaOperands x, KdaChunks chunks) {
  wait_for_earlier();
  const KdaPlace<T> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  const int element = static_cast<int>(blockIdx.z) * kDecayThreads + static_cast<int>(threadIdx.x);
  if (element >= x.key_size) return;
  const int count = at.count();
  const auto first = static_cast<int>(at.token());
  const int64_t begin = at.key_at() + element;
  float sum = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t key = begin + i * x.key_stride();
    const int start = at.start(chunks, i);
    sum = (start == first + i ? 0 : sum) + x.decay[key];
    const float reads = start < first ? expf(sum) : 0;
    const float q = load<1>(static_cast<const T*>(x.q) + key)[0];
    const float k = load<1>(static_cast<const T*>(x.k) + key)[0];
    chunks.sums[key] = sum;
    chunks.q_kept[key] = q * at.of_row(chunks.marks.q_inverse, i) * kda_query_scale(x) * reads;
    chunks.k_kept[key] = k * at.of_row(chunks.marks.k_inverse, i) * reads;
  }
  const int last_start = at.start(chunks, count - 1);
  for (int i = 0; i < count; ++i) {
    const int64_t key = begin + i * x.key_stride();
    const float writes = at.start(chunks, i) == last_start ? expf(sum - chunks.sums[key]) : 0;
    const float k = load<1>(static_cast<const T*>(x.k) + key)[0];
    chunks.k_rest[key] = k * at.of_row(chunks.marks.k_inverse, i) * writes;
  }
  chunks.kept[at.kept_at() + element] = last_start < first ? expf(sum) : 0;
}

constexpr int kDepth = 16;  // elements of keys at a time
constexpr int kOwnRows = 8;
constexpr int kOwnColumns = 4;
constexpr int kColumnOwners = kDeltaRows / kOwnColumns;
static_assert(kDeltaSquare == kExactThreads * kOwnRows * kOwnColumns);

/// Elements of a chunk's unit queries and keys, and of the sums of their decays.
struct KeySlices {
  float q[kDepth][kDeltaRows + 1];
  float k[kDepth][kDeltaRows + 1];
  float sums[kDepth][kDeltaRows + 1];  // in units of log 2
};

/// Pairs of a chunk's tokens: a thread has 8 readers by 4 writers.
template <typename T>
struct KdaPairs {
  const DeltaOperands& x;
  const KdaChunks& chunks;
  const KdaPlace<T>& at;
  float of_queries[kOwnRows][kOwnColumns] = {};
  float of_keys[kOwnRows][kOwnColumns] = {};

  static __device__ int row(int i) {
    return static_cast<int>(threadIdx.x) / kColumnOwners * kOwnRows + i;
  }
  static __device__ int column(int j) {
    return static_cast<int>(threadIdx.x) % kColumnOwners * kOwnColumns + j;
  }

  __device__ void load(KeySlices& slices, int first) const {
    const int count = at.count();
    for (int n = static_cast<int>(threadIdx.x); n < kDepth * kDeltaRows; n += kExactThreads) {
      const int i = n / kDepth;
      const int e = n % kDepth;
      const bool there = i < count && first + e < x.key_size;
      const int64_t key = at.key_at() + i * x.key_stride() + first + e;
      slices.q[e][i] = there ? cuda::load<1>(static_cast<const T*>(x.q) + key)[0] : 0;
      slices.k[e][i] = there ? cuda::load<1>(static_cast<const T*>(x.k) + key)[0] : 0;
      slices.sums[e][i] = there ? chunks.sums[key] * kLog2E : 0;
    }
    __syncthreads();
  }

  /// Of elements of keys that are in shared memory. A later token's factor is 1 here: it is masked.
  __device__ void add(const KeySlices& slices) {
    for (int e = 0; e < kDepth; ++e) {
#pragma unroll
      for (int j = 0; j < kOwnColumns; ++j) {
        const float k = slices.k[e][column(j)];
        const float sum = slices.sums[e][column(j)];
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          const float decayed = k * fast_exp2(fminf(slices.sums[e][row(i)] - sum, 0));
          of_queries[i][j] += slices.q[e][row(i)] * decayed;
          of_keys[i][j] += slices.k[e][row(i)] * decayed;
        }
      }
    }
    __syncthreads();
  }
};

/// The inverse of I + `a`, which lies below the diagonal: a thread makes a column.
__device__ __forceinline__ void invert(float (*inverse)[kDeltaRows + 1],
                                       const float (*a)[kDeltaRows + 1]) {
  const int j = static_cast<int>(threadIdx.x);
  if (j >= kDeltaRows) return;
  for (int i = 0; i < kDeltaRows; ++i) {
    float value = i == j ? 1 : 0;
    for (int m = j; m < i; ++m) value -= a[i][m] * inverse[m][j];
    inverse[i][j] = i < j ? 0 : value;
  }
}

template <typename T>
__global__ void __launch_bounds__(kExactThreads)
    compare_keys(const __grid_constant__ DeltaOperands x, KdaChunks chunks) {
  __shared__ float a[kDeltaRows][kDeltaRows + 1];
  __shared__ union {
    KeySlices slices;
    float inverse[kDeltaRows][kDeltaRows + 1];
  } shared;
  wait_for_earlier();
  const KdaPlace<T> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  KdaPairs<T> pairs{x, chunks, at};
  for (int first = 0; first < x.key_size; first += kDepth) {
    pairs.load(shared.slices, first);
    pairs.add(shared.slices);
  }
  const int count = at.count();
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
#pragma unroll
    for (int c = 0; c < kOwnColumns; ++c) {
      const int i = pairs.row(r);
      const int j = pairs.column(c);
      const int64_t element = at.square_at() + i * kDeltaRows + j;
      const bool joined = j <= i && i < count && at.start(chunks, i) == at.start(chunks, j);
      const float scale = joined ? at.of_row(chunks.marks.k_inverse, j) : 0;
      chunks.p[element] = joined ? pairs.of_queries[r][c] * scale * kda_query_scale(x) *
                                       at.of_row(chunks.marks.q_inverse, i)
                                 : 0;
      const float of_keys =
          joined && j < i ? pairs.of_keys[r][c] * scale * at.of_row(chunks.marks.k_inverse, i) : 0;
      if (chunks.a != nullptr) chunks.a[element] = of_keys;
      a[i][j] = i < count ? at.beta(i) * of_keys : 0;
    }
  }
  __syncthreads();
  invert(shared.inverse, a);
  __syncthreads();
  float* to = chunks.inverse + at.square_at();
  for (int i = static_cast<int>(threadIdx.x); i < kDeltaSquare; i += kExactThreads)
    to[i] = shared.inverse[i / kDeltaRows][i % kDeltaRows];
}

/// A head's states from chunk to chunk, of 64 columns of values.
template <typename T>
struct KdaScan {
  using OfRows = DeltaTile<AlongRows<float>, AcrossRows<float>>;
  using OfWritten = DeltaTile<AcrossRows<float>, AcrossRows<float>>;
  union Shared {
    typename OfRows::Shared rows;
    typename OfWritten::Shared written;
  };

  const DeltaOperands& x;
  const KdaChunks& chunks;
  Shared& shared;
  int column;  // first

  __device__ AcrossRows<float> columns_of(const float* values, int64_t stride) const {
    return {values, x.value_size, stride};
  }
  __device__ AlongRows<float> square(const float* values, const KdaPlace<T>& at) const {
    return {values + at.square_at(), kDeltaRows, kDeltaRows};
  }

  /// What the chunk's tokens write.
  __device__ void solve(const KdaPlace<T>& at, const float* state) {
    const int count = at.count();
    OfRows predicted;
    predicted.add(shared.rows, {chunks.k_kept + at.key_at(), count, x.key_stride()}, 0,
                  columns_of(state, x.value_size), column, 0, x.key_size);
    float* written = chunks.written + at.value_at();
    const int64_t stride = x.value_stride();
    predicted.for_each([&](int i, int j, float sum) {
      if (i >= count || column + j >= x.value_size) return;
      const float value = static_cast<float>(at.v()[i * stride + column + j]);
      written[i * stride + column + j] = at.beta(i) * (value - sum);
    });
    __syncthreads();
    OfRows solved;
    solved.add(shared.rows, square(chunks.inverse, at), 0, columns_of(written, stride), column, 0,
               count);
    solved.for_each([&](int i, int j, float sum) {
      if (i < count && column + j < x.value_size) written[i * stride + column + j] = sum;
    });
    __syncthreads();
  }

  __device__ void write_outputs(const KdaPlace<T>& at, const float* state, T* o) {
    const int count = at.count();
    const int64_t stride = x.value_stride();
    OfRows read;
    read.add(shared.rows, {chunks.q_kept + at.key_at(), count, x.key_stride()}, 0,
             columns_of(state, x.value_size), column, 0, x.key_size);
    read.add(shared.rows, square(chunks.p, at), 0,
             columns_of(chunks.written + at.value_at(), stride), column, 0, count);
    read.for_each([&](int i, int j, float sum) {
      if (i < count && column + j < x.value_size)
        store_value(o + at.value_at() + i * stride + column + j, sum);
    });
  }

  /// `to` may be `state` itself.
  __device__ void advance(const KdaPlace<T>& at, const float* state, float* to) {
    const float* kept = chunks.kept + at.kept_at();
    for (int row = 0; row < x.key_size; row += kDeltaRows) {
      OfWritten added;
      added.add(shared.written, {chunks.k_rest + at.key_at(), x.key_size, x.key_stride()}, row,
                columns_of(chunks.written + at.value_at(), x.value_stride()), column, 0,
                at.count());
      added.for_each([&](int i, int j, float sum) {
        if (row + i >= x.key_size || column + j >= x.value_size) return;
        const int64_t element = static_cast<int64_t>(row + i) * x.value_size + column + j;
        to[element] = kept[row + i] * state[element] + sum;
      });
    }
    __syncthreads();
  }
};

template <typename T>
__global__ void __launch_bounds__(kExactThreads)
    scan_chunks(const __grid_constant__ DeltaOperands x, KdaChunks chunks, bool keeps, T* o) {
  __shared__ typename KdaScan<T>::Shared shared;
  wait_for_earlier();
  KdaScan<T> scan{x, chunks, shared, static_cast<int>(blockIdx.y) * kDeltaColumns};
  KdaPlace<T> at{{x, 0, static_cast<int>(blockIdx.x)}};
  if (x.bounds != nullptr || *x.start == 0) {
    float* state = chunks.states + at.state_at(0);
    const int columns = min(kDeltaColumns, x.value_size - scan.column);
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(x.key_size) * columns;
         i += kExactThreads)
      state[i / columns * x.value_size + scan.column + i % columns] = 0;
    __syncthreads();
  }
  const int count = x.num_chunks();
  for (; at.chunk < count; ++at.chunk) {
    const float* state = chunks.states + at.state_at(keeps ? at.chunk : 0);
    scan.solve(at, state);
    if (o != nullptr) scan.write_outputs(at, state, o);
    scan.advance(at, state, chunks.states + at.state_at(keeps ? at.chunk + 1 : 0));
  }
}

}  // namespace

void launch_kda(const DeltaOperands& x, const KdaChunks& chunks, bool keeps, void* o,
                cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_delta_starts(x, chunks.marks.starts, stream);
  launch_delta_lengths(x, chunks.marks, stream);
  const auto count = static_cast<unsigned>(num_delta_chunks(x.tokens));
  const auto heads = static_cast<unsigned>(x.heads);
  const auto slices = static_cast<unsigned>(divide_up(x.key_size, kDecayThreads));
  const auto columns = static_cast<unsigned>(divide_up(x.value_size, kDeltaColumns));
  with_type(x.dtype, [&]<typename T>() {
    launch_early(decay_keys<T>, {dim3(count, heads, slices), kDecayThreads}, stream, x, chunks);
    launch_early(compare_keys<T>, {dim3(count, heads), kExactThreads}, stream, x, chunks);
    launch_early(scan_chunks<T>, {dim3(heads, columns), kExactThreads}, stream, x, chunks, keeps,
                 static_cast<T*>(o));
  });
}

}  // namespace tessera::cuda
