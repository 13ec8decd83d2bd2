// Forward: decays and comparisons of keys of all chunks at once, then the states from chunk to
// chunk, 64 columns of values of a head by a block.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/kda/kda_keys.cuh"

namespace tessera::cuda {
namespace {

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
  KdaPairs<T> pairs{x, chunks.marks, chunks.sums, at};
  pairs.find(shared.slices);
  pairs.for_each([&](int i, int j, float of_queries, float of_keys) {
    const int64_t element = at.square_at() + i * kDeltaRows + j;
    chunks.p[element] = of_queries;
    if (chunks.a != nullptr) chunks.a[element] = of_keys;
    a[i][j] = i < at.count() ? at.beta(i) * of_keys : 0;
  });
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
    const KdaKeys<float> keys = {chunks.marks,  chunks.sums,   chunks.q_kept,
                                 chunks.k_kept, chunks.k_rest, chunks.kept};
    launch_early(decay_keys<T, float>, {dim3(count, heads, slices), kDecayThreads}, stream, x,
                 keys);
    launch_early(compare_keys<T>, {dim3(count, heads), kExactThreads}, stream, x, chunks);
    launch_early(scan_chunks<T>, {dim3(heads, columns), kExactThreads}, stream, x, chunks, keeps,
                 static_cast<T*>(o));
  });
}

}  // namespace tessera::cuda
