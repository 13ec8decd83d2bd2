// The kernels for all sizes, forward: what chunks need of their own keys first, for all at once,
// then the states from chunk to chunk, 64 columns of values of a head by a block.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/gated_delta/delta_exact.cuh"

namespace tessera::cuda {
namespace {

/// (I + A)^-1 of A in `a`, below its diagonal: a thread makes a column.
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
    prepare_chunks(const __grid_constant__ DeltaOperands x, ExactDelta scratch) {
  using Tile = DeltaTile<AlongRows<T>, AlongRows<T>>;
  __shared__ DeltaCoefficients c;
  __shared__ float a[kDeltaRows][kDeltaRows + 1];
  __shared__ union {
    typename Tile::Shared tile;
    float inverse[kDeltaRows][kDeltaRows + 1];
  } shared;
  wait_for_earlier();
  const DeltaPlace<T> at{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)};
  c.load(x, scratch.marks, at.chunk, at.head);
  const AlongRows<T> q(at.q(), c.count, x.key_stride());
  const AlongRows<T> k(at.k(), c.count, x.key_stride());
  Tile of_q;
  of_q.add(shared.tile, q, 0, k, 0, 0, x.key_size);
  float* p = scratch.p + at.square_at();
  of_q.for_each([&](int i, int j, float sum) {
    p[i * kDeltaRows + j] = sum * c.q_inverse[i] * c.k_inverse[j] * c.between(i, j);
  });
  Tile of_k;
  of_k.add(shared.tile, k, 0, k, 0, 0, x.key_size);
  of_k.for_each([&](int i, int j, float sum) {
    a[i][j] = i == j ? 0 : sum * c.beta[i] * c.k_inverse[i] * c.k_inverse[j] * c.between(i, j);
  });
  __syncthreads();
  invert(shared.inverse, a);
  __syncthreads();
  float* to = scratch.inverse + at.square_at();
  for (int i = static_cast<int>(threadIdx.x); i < kDeltaSquare; i += kExactThreads)
    to[i] = shared.inverse[i / kDeltaRows][i % kDeltaRows];
}

/// A head's states from chunk to chunk, of 64 columns of values.
template <typename T>
struct ExactScan {
  using OfKeys = DeltaTile<AlongRows<T>, AcrossRows<float>>;
  using OfSquares = DeltaTile<AlongRows<float>, AcrossRows<float>>;
  using OfWritten = DeltaTile<AcrossRows<T>, AcrossRows<float>>;
  union Shared {
    typename OfKeys::Shared keys;
    typename OfSquares::Shared squares;
    typename OfWritten::Shared written;
  };

  const DeltaOperands& x;
  const ExactDelta& scratch;
  DeltaCoefficients& c;
  Shared& shared;
  int column;  // first

  __device__ bool has(int i, int j) const { return i < c.count && column + j < x.value_size; }
  __device__ AcrossRows<float> rows_of(const float* values, int64_t stride) const {
    return {values, x.value_size, stride};
  }

  /// What the chunk's tokens write, and that times `writes` into `scaled`.
  __device__ void solve(const DeltaPlace<T>& at, const float* state) {
    OfKeys predicted;
    predicted.add(shared.keys, {at.k(), c.count, x.key_stride()}, 0, rows_of(state, x.value_size),
                  column, 0, x.key_size);
    float* written = scratch.written + at.value_at();
    const int64_t stride = x.value_stride();
    predicted.for_each([&](int i, int j, float sum) {
      if (!has(i, j)) return;
      const float value = static_cast<float>(at.v()[i * stride + column + j]);
      written[i * stride + column + j] = c.beta[i] * (value - c.reads[i] * c.k_inverse[i] * sum);
    });
    __syncthreads();
    OfSquares solved;
    solved.add(shared.squares, {scratch.inverse + at.square_at(), kDeltaRows, kDeltaRows}, 0,
               rows_of(written, stride), column, 0, c.count);
    float* scaled = scratch.scaled + static_cast<int64_t>(at.head) * kDeltaRows * x.value_size;
    solved.for_each([&](int i, int j, float sum) {
      if (!has(i, j)) return;
      written[i * stride + column + j] = sum;
      scaled[i * x.value_size + column + j] = sum * c.writes[i] * c.k_inverse[i];
    });
    __syncthreads();
  }

  __device__ void write_outputs(const DeltaPlace<T>& at, const float* state, T* o) {
    OfKeys read;
    read.add(shared.keys, {at.q(), c.count, x.key_stride()}, 0, rows_of(state, x.value_size),
             column, 0, x.key_size);
    const int64_t stride = x.value_stride();
    OfSquares within;
    within.add(shared.squares, {scratch.p + at.square_at(), kDeltaRows, kDeltaRows}, 0,
               rows_of(scratch.written + at.value_at(), stride), column, 0, c.count);
    const float* sums = &within.sums[0][0];
    int next = 0;
    read.for_each([&](int i, int j, float sum) {
      const float total = sums[next++] + sum * c.reads[i] * c.q_inverse[i];
      if (has(i, j)) store_value(o + at.value_at() + i * stride + column + j, total);
    });
  }

  /// `to` may be `state` itself.
  __device__ void advance(const DeltaPlace<T>& at, const float* state, float* to) {
    const float* scaled =
        scratch.scaled + static_cast<int64_t>(at.head) * kDeltaRows * x.value_size;
    for (int row = 0; row < x.key_size; row += kDeltaRows) {
      OfWritten added;
      added.add(shared.written, {at.k(), x.key_size, x.key_stride()}, row,
                rows_of(scaled, x.value_size), column, 0, c.count);
      added.for_each([&](int i, int j, float sum) {
        if (row + i >= x.key_size || column + j >= x.value_size) return;
        const int64_t element = static_cast<int64_t>(row + i) * x.value_size + column + j;
        to[element] = (c.kept == 0 ? 0 : c.kept * state[element]) + sum;
      });
    }
    __syncthreads();
  }
};

template <typename T>
__global__ void __launch_bounds__(kExactThreads)
    scan_chunks(const __grid_constant__ DeltaOperands x, ExactDelta scratch, bool keeps, T* o) {
  __shared__ DeltaCoefficients c;
  __shared__ typename ExactScan<T>::Shared shared;
  wait_for_earlier();
  const int head = static_cast<int>(blockIdx.x);
  ExactScan<T> scan{x, scratch, c, shared, static_cast<int>(blockIdx.y) * kDeltaColumns};
  DeltaPlace<T> at{x, 0, head};
  if (x.bounds != nullptr || *x.start == 0) {
    float* state = scratch.states + at.state_at(0);
    const int columns = min(kDeltaColumns, x.value_size - scan.column);
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(x.key_size) * columns;
         i += kExactThreads)
      state[i / columns * x.value_size + scan.column + i % columns] = 0;
    __syncthreads();
  }
  const int chunks = x.num_chunks();
  for (; at.chunk < chunks; ++at.chunk) {
    c.load(x, scratch.marks, at.chunk, head);
    const float* state = scratch.states + at.state_at(keeps ? at.chunk : 0);
    scan.solve(at, state);
    if (o != nullptr) scan.write_outputs(at, state, o);
    scan.advance(at, state, scratch.states + at.state_at(keeps ? at.chunk + 1 : 0));
  }
}

}  // namespace

void launch_exact_delta(const DeltaOperands& x, const ExactDelta& scratch, bool keeps, void* o,
                        cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_delta_marks(x, scratch.marks, stream);
  with_type(x.dtype, [&]<typename T>() {
    const auto chunks = static_cast<unsigned>(num_delta_chunks(x.tokens));
    const auto heads = static_cast<unsigned>(x.heads);
    launch_early(prepare_chunks<T>, {dim3(chunks, heads), kExactThreads}, stream, x, scratch);
    const auto columns = static_cast<unsigned>(divide_up(x.value_size, kDeltaColumns));
    launch_early(scan_chunks<T>, {dim3(heads, columns), kExactThreads}, stream, x, scratch, keeps,
                 static_cast<T*>(o));
  });
}

}  // namespace tessera::cuda
