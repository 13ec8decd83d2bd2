// Backward: the states' gradients from the last chunk to the first, then everything else of all
// chunks at once.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/kda/kda_place.cuh"

namespace tessera::cuda {
namespace {

/// The gradients of a head's states from chunk to chunk, of 64 columns of values.
template <typename T>
struct KdaReverseScan {
  using OfOutputs = DeltaTile<AcrossRows<float>, AcrossRows<T>>;
  using OfKeys = DeltaTile<AlongRows<float>, AcrossRows<float>>;
  using OfRight = DeltaTile<AcrossRows<float>, AcrossRows<float>>;
  union Shared {
    typename OfOutputs::Shared outputs;
    typename OfKeys::Shared keys;
    typename OfRight::Shared right;
  };

  const DeltaOperands& x;
  const KdaChunks& chunks;
  const DeltaGrads& grads;
  Shared& shared;
  int column;  // first

  __device__ AcrossRows<T> grad_o(const KdaPlace<T>& at) const {
    return {static_cast<const T*>(grads.o) + at.value_at(), x.value_size, x.value_stride()};
  }
  __device__ float* scaled(const KdaPlace<T>& at) const {
    return chunks.scaled + static_cast<int64_t>(at.head) * kDeltaRows * x.value_size;
  }

  /// The gradients of what tokens write, then of the right side of their system, and with it of v.
  __device__ void solve(const KdaPlace<T>& at, const float* state_grad) {
    const int count = at.count();
    const int64_t stride = x.value_stride();
    OfOutputs of_outputs;
    of_outputs.add(shared.outputs, {chunks.p + at.square_at(), kDeltaRows, kDeltaRows}, 0,
                   grad_o(at), column, 0, count);
    OfKeys of_state;
    of_state.add(shared.keys, {chunks.k_rest + at.key_at(), count, x.key_stride()}, 0,
                 {state_grad, x.value_size, x.value_size}, column, 0, x.key_size);
    float* of_right = chunks.of_right + at.value_at();
    const float* sums = &of_outputs.sums[0][0];
    int next = 0;
    of_state.for_each([&](int i, int j, float sum) {
      const float total = sums[next++] + sum;
      if (i < count && column + j < x.value_size) of_right[i * stride + column + j] = total;
    });
    __syncthreads();
    OfRight solved;
    solved.add(shared.right, {chunks.inverse + at.square_at(), kDeltaRows, kDeltaRows}, 0,
               {of_right, x.value_size, stride}, column, 0, count);
    T* grad_v = static_cast<T*>(grads.v) + at.value_at();
    solved.for_each([&](int i, int j, float sum) {
      if (i >= count || column + j >= x.value_size) return;
      const int64_t element = i * stride + column + j;
      of_right[element] = sum;
      store_value(grad_v + element, sum * at.beta(i));
      scaled(at)[static_cast<int64_t>(i) * x.value_size + column + j] = -sum * at.beta(i);
    });
    __syncthreads();
  }

  /// The gradient of the state before the chunk.
  __device__ void go_back(const KdaPlace<T>& at, const float* state_grad, float* to) {
    const float* kept = chunks.kept + at.kept_at();
    const int count = at.count();
    for (int row = 0; row < x.key_size; row += kDeltaRows) {
      OfOutputs of_queries;
      of_queries.add(shared.outputs, {chunks.q_kept + at.key_at(), x.key_size, x.key_stride()}, row,
                     grad_o(at), column, 0, count);
      OfRight of_keys;
      of_keys.add(shared.right, {chunks.k_kept + at.key_at(), x.key_size, x.key_stride()}, row,
                  {scaled(at), x.value_size, x.value_size}, column, 0, count);
      const float* sums = &of_queries.sums[0][0];
      int next = 0;
      of_keys.for_each([&](int i, int j, float sum) {
        const float total = sums[next++] + sum;
        if (row + i >= x.key_size || column + j >= x.value_size) return;
        const int64_t element = static_cast<int64_t>(row + i) * x.value_size + column + j;
        to[element] = kept[row + i] * state_grad[element] + total;
      });
    }
    __syncthreads();
  }
};

template <typename T>
__global__ void __launch_bounds__(kExactThreads)
    scan_chunks_back(const __grid_constant__ DeltaOperands x, KdaChunks chunks, DeltaGrads grads) {
  __shared__ typename KdaReverseScan<T>::Shared shared;
  wait_for_earlier();
  KdaReverseScan<T> scan{x, chunks, grads, shared, static_cast<int>(blockIdx.y) * kDeltaColumns};
  KdaPlace<T> at{{x, x.num_chunks() - 1, static_cast<int>(blockIdx.x)}};
  float* last = chunks.state_grads + at.state_at(at.chunk);
  const int columns = min(kDeltaColumns, x.value_size - scan.column);
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(x.key_size) * columns; i += kExactThreads)
    last[i / columns * x.value_size + scan.column + i % columns] = 0;
  __syncthreads();
  for (; at.chunk >= 0; --at.chunk) {
    const float* state_grad = chunks.state_grads + at.state_at(at.chunk);
    scan.solve(at, state_grad);
    if (at.chunk > 0) scan.go_back(at, state_grad, chunks.state_grads + at.state_at(at.chunk - 1));
  }
}

/// What a block of finish_chunks keeps in shared memory beside tiles.
struct KdaSums {
  float square[kDeltaRows][kDeltaRows + 1];
  float of_beta[kDeltaRows];
  float of_last[kDeltaRows];  // of G_C, of 64 elements of keys
  int starts[kDeltaRows];     // INT32_MIN in rows that are not there
};

/// Gradients of one head's q, k, decays and beta in a chunk.
template <typename T>
struct KdaFinish {
  using OfOutputs = DeltaTile<AlongRows<T>, AlongRows<float>>;
  using OfRight = DeltaTile<AlongRows<float>, AlongRows<float>>;
  union Shared {
    typename OfOutputs::Shared outputs;
    typename OfRight::Shared right;
  };

  const DeltaOperands& x;
  const KdaChunks& chunks;
  const DeltaGrads& grads;
  const KdaPlace<T> at;
  KdaSums& own;
  Shared& shared;
  int count;

  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  __device__ AlongRows<T> grad_o() const {
    return {static_cast<const T*>(grads.o) + at.value_at(), count, x.value_stride()};
  }
  __device__ AlongRows<float> values(const float* from) const {
    return {from + at.value_at(), count, x.value_stride()};
  }
  __device__ AlongRows<float> states(const float* from) const {
    return {from + at.state_at(at.chunk), x.key_size, x.value_size};
  }
  __device__ bool joins(int i, int j) const { return own.starts[i] == own.starts[j]; }

  /// Adds `sign` times the sums of own.square's rows.
  __device__ void add_of_beta(float sign) {
    __syncthreads();
    if (thread() < kDeltaRows) {
      float sum = 0;
      for (int j = 0; j < kDeltaRows; ++j) sum += own.square[thread()][j];
      own.of_beta[thread()] += sign * sum;
    }
    __syncthreads();
  }

  /// Gradients of P and A where these were.
  __device__ void find_of_pairs() {
    float* p = chunks.p + at.square_at();
    float* a = chunks.a + at.square_at();
    OfOutputs of_outputs;
    of_outputs.add(shared.outputs, grad_o(), 0, values(chunks.written), 0, 0, x.value_size);
    of_outputs.for_each([&](int i, int j, float sum) {
      p[i * kDeltaRows + j] = i < count && j <= i && joins(i, j) ? sum : 0;
    });
    OfRight of_right;
    of_right.add(shared.right, values(chunks.of_right), 0, values(chunks.written), 0, 0,
                 x.value_size);
    of_right.for_each([&](int i, int j, float sum) {
      const bool there = i < count && j < i && joins(i, j);
      own.square[i][j] = there ? sum * a[i * kDeltaRows + j] : 0;
      a[i * kDeltaRows + j] = there ? -sum * at.beta(i) : 0;
    });
    add_of_beta(-1);
  }

  /// Of v in beta (v - ...).
  __device__ void add_of_values() {
    const int lane = thread() % 32;
    for (int i = thread() / 32; i < count; i += kExactThreads / 32) {
      const float* grad = chunks.of_right + at.value_at() + i * x.value_stride();
      const T* value = at.v() + i * x.value_stride();
      float sum = 0;
      for (int j = lane; j < x.value_size; j += 32) sum += grad[j] * static_cast<float>(value[j]);
      sum = sum_lanes(sum);
      if (lane == 0) own.of_beta[i] += sum;
    }
    __syncthreads();
  }

  __device__ float unit_q(int i, int element) const {
    return static_cast<float>(at.q()[i * x.key_stride() + element]) * kda_query_scale(x) *
           at.of_row(chunks.marks.q_inverse, i);
  }
  __device__ float unit_k(int i, int element) const {
    return static_cast<float>(at.k()[i * x.key_stride() + element]) *
           at.of_row(chunks.marks.k_inverse, i);
  }

  /// Of an element of token i's q and k, as a reader and as a writer.
  struct Parts {
    float q;
    float k_read;
    float k_write;
  };

  /// Adds what comes through pairs of tokens. REQUIRES find_of_pairs().
  __device__ void add_of_pairs(int i, int element, Parts& parts) const {
    const float* of_p = chunks.p + at.square_at();
    const float* of_a = chunks.a + at.square_at();
    const float* sums = chunks.sums + at.key_at() + element;
    const float own_sum = sums[i * x.key_stride()];
    for (int j = 0; j <= i; ++j) {
      if (!joins(i, j)) continue;
      const float key = unit_k(j, element) * expf(own_sum - sums[j * x.key_stride()]);
      parts.q += of_p[i * kDeltaRows + j] * key;
      parts.k_read += of_a[i * kDeltaRows + j] * key;
    }
    for (int m = i; m < count; ++m) {
      if (!joins(i, m)) break;
      const float of_factor = of_p[m * kDeltaRows + i] * unit_q(m, element) +
                              of_a[m * kDeltaRows + i] * unit_k(m, element);
      parts.k_write += of_factor * expf(sums[m * x.key_stride()] - own_sum);
    }
  }

  /// Elements [first, first + 64) of the gradients of q, k and G, the latter's where those of g
  /// will be; what reaches G_C through keys takes k_rest's place.
  __device__ void write_elements(int first) {
    OfOutputs of_queries;
    of_queries.add(shared.outputs, grad_o(), 0, states(chunks.states), first, 0, x.value_size);
    OfRight of_readers;
    of_readers.add(shared.right, values(chunks.of_right), 0, states(chunks.states), first, 0,
                   x.value_size);
    OfRight of_writers;
    of_writers.add(shared.right, values(chunks.written), 0, states(chunks.state_grads), first, 0,
                   x.value_size);
    const float* query_sums = &of_queries.sums[0][0];
    const float* reader_sums = &of_readers.sums[0][0];
    const int last_start = own.starts[count - 1];
    int next = 0;
    of_writers.for_each([&](int i, int j, float writer_sum) {
      const float query_sum = query_sums[next];
      const float reader_sum = reader_sums[next];
      ++next;
      own.square[i][j] = 0;
      const int element = first + j;
      if (i >= count || element >= x.key_size) return;
      const int64_t key = at.key_at() + i * x.key_stride() + element;
      const float sum = chunks.sums[key];
      const float last = chunks.sums[at.key_at() + (count - 1) * x.key_stride() + element];
      const float reads = own.starts[i] < at.token() ? expf(sum) : 0;
      const float writes = own.starts[i] == last_start ? expf(last - sum) : 0;
      own.square[i][j] = reader_sum * chunks.k_kept[key];
      chunks.k_rest[key] *= writer_sum;
      Parts parts{query_sum * reads, -at.beta(i) * reader_sum * reads, writer_sum * writes};
      add_of_pairs(i, element, parts);
      chunks.q_kept[key] = parts.q;
      chunks.k_kept[key] = parts.k_read + parts.k_write;
      grads.decay[key] =
          unit_q(i, element) * parts.q + unit_k(i, element) * (parts.k_read - parts.k_write);
    });
    add_of_beta(-1);
  }

  /// Of the elements' state that is kept, its product with the gradient of that behind.
  __device__ void find_of_last(int first) {
    const int lane = thread() % 32;
    const float* kept = chunks.kept + at.kept_at();
    for (int j = thread() / 32; j < kDeltaRows; j += kExactThreads / 32) {
      float sum = 0;
      if (first + j < x.key_size && kept[first + j] != 0) {
        const int64_t row = static_cast<int64_t>(first + j) * x.value_size;
        const float* state = chunks.states + at.state_at(at.chunk) + row;
        const float* grad = chunks.state_grads + at.state_at(at.chunk) + row;
        for (int v = lane; v < x.value_size; v += 32) sum += state[v] * grad[v];
        sum = sum_lanes(sum) * kept[first + j];
      }
      if (lane == 0) own.of_last[j] = sum;
    }
    __syncthreads();
  }

  /// From the gradients of G those of g: sums from a token to its sequence's last in the chunk.
  __device__ void sum_decays(int first) {
    const int element = first + thread();
    if (thread() < kDeltaRows && element < x.key_size) {
      float* of_decay = grads.decay + at.key_at() + element;
      const float* of_rest = chunks.k_rest + at.key_at() + element;
      float sum = own.of_last[thread()];
      for (int i = 0; i < count; ++i) sum += of_rest[i * x.key_stride()];
      for (int i = count - 1; i >= 0; --i) {
        if (i + 1 < count && !joins(i, i + 1)) sum = 0;
        sum += of_decay[i * x.key_stride()];
        of_decay[i * x.key_stride()] = sum;
      }
    }
    __syncthreads();
  }
};

template <typename T>
__global__ void __launch_bounds__(kExactThreads)
    finish_chunks(const __grid_constant__ DeltaOperands x, KdaChunks chunks, DeltaGrads grads) {
  __shared__ KdaSums own;
  __shared__ typename KdaFinish<T>::Shared shared;
  wait_for_earlier();
  const KdaPlace<T> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  const int count = at.count();
  const auto i = static_cast<int>(threadIdx.x);
  if (i < kDeltaRows) {
    own.of_beta[i] = 0;
    own.starts[i] = i < count ? at.start(chunks, i) : INT32_MIN;
  }
  __syncthreads();
  KdaFinish<T> finish{x, chunks, grads, at, own, shared, count};
  finish.find_of_pairs();
  finish.add_of_values();
  for (int first = 0; first < x.key_size; first += kDeltaRows) {
    finish.write_elements(first);
    finish.find_of_last(first);
    finish.sum_decays(first);
  }
  if (i < count) grads.beta[(at.token() + i) * x.heads + at.head] = own.of_beta[i];
}

}  // namespace

void launch_kda_backward(const DeltaOperands& x, const KdaChunks& chunks, const DeltaGrads& grads,
                         cudaStream_t stream) {
  if (x.tokens == 0) return;
  const auto count = static_cast<unsigned>(num_delta_chunks(x.tokens));
  const auto heads = static_cast<unsigned>(x.heads);
  const auto columns = static_cast<unsigned>(divide_up(x.value_size, kDeltaColumns));
  with_type(x.dtype, [&]<typename T>() {
    launch_early(scan_chunks_back<T>, {dim3(heads, columns), kExactThreads}, stream, x, chunks,
                 grads);
    launch_early(finish_chunks<T>, {dim3(count, heads), kExactThreads}, stream, x, chunks, grads);
  });
  launch_delta_unit_grads(
      x, chunks.marks, {.of_q = chunks.q_kept, .of_k = chunks.k_kept, .q = grads.q, .k = grads.k},
      stream);
}

}  // namespace tessera::cuda
