// The kernels for all sizes, backward: the states' gradients from the last chunk to the first, then
// everything else of all chunks at once.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/gated_delta/delta_exact.cuh"

namespace tessera::cuda {
namespace {

/// The gradients of a head's states from chunk to chunk, of 64 columns of values.
template <typename T>
struct ExactReverseScan {
  using OfOutputs = DeltaTile<AcrossRows<float>, AcrossRows<T>>;
  using OfKeys = DeltaTile<AlongRows<T>, AcrossRows<float>>;
  using OfSquares = DeltaTile<AcrossRows<float>, AcrossRows<float>>;
  using OfState = DeltaTile<AcrossRows<T>, AcrossRows<float>>;
  union Shared {
    typename OfOutputs::Shared outputs;
    typename OfKeys::Shared keys;
    typename OfSquares::Shared squares;
    typename OfState::Shared state;
  };

  const DeltaOperands& x;
  const ExactDelta& scratch;
  const DeltaGrads& grads;
  DeltaCoefficients& c;
  Shared& shared;
  int column;  // first

  __device__ bool has(int i, int j) const { return i < c.count && column + j < x.value_size; }
  __device__ const T* grad_o(const DeltaPlace<T>& at) const {
    return static_cast<const T*>(grads.o) + at.value_at();
  }
  __device__ float* scaled_o(int head) const {
    return scratch.scaled + static_cast<int64_t>(head) * kDeltaRows * x.value_size;
  }
  __device__ float* scaled_right(int head) const { return scaled_o(x.heads + head); }

  /// The gradients of what tokens write, then of the right side of their system, and with it of v.
  __device__ void solve(const DeltaPlace<T>& at, const float* state_grad) {
    const int64_t stride = x.value_stride();
    OfOutputs of_outputs;
    of_outputs.add(shared.outputs, {scratch.p + at.square_at(), kDeltaRows, kDeltaRows}, 0,
                   {grad_o(at), x.value_size, stride}, column, 0, c.count);
    OfKeys of_state;
    of_state.add(shared.keys, {at.k(), c.count, x.key_stride()}, 0,
                 {state_grad, x.value_size, x.value_size}, column, 0, x.key_size);
    float* of_right = scratch.of_right + at.value_at();
    const float* sums = &of_outputs.sums[0][0];
    int next = 0;
    of_state.for_each([&](int i, int j, float sum) {
      const float total = sums[next++] + sum * c.writes[i] * c.k_inverse[i];
      if (has(i, j)) of_right[i * stride + column + j] = total;
    });
    __syncthreads();
    OfSquares solved;
    solved.add(shared.squares, {scratch.inverse + at.square_at(), kDeltaRows, kDeltaRows}, 0,
               {of_right, x.value_size, stride}, column, 0, c.count);
    T* grad_v = static_cast<T*>(grads.v) + at.value_at();
    solved.for_each([&](int i, int j, float sum) {
      if (!has(i, j)) return;
      const int64_t element = i * stride + column + j;
      of_right[element] = sum;
      store_value(grad_v + element, sum * c.beta[i]);
      const int64_t scaled = static_cast<int64_t>(i) * x.value_size + column + j;
      scaled_o(at.head)[scaled] =
          static_cast<float>(grad_o(at)[element]) * c.reads[i] * c.q_inverse[i];
      scaled_right(at.head)[scaled] = -sum * c.beta[i] * c.reads[i] * c.k_inverse[i];
    });
    __syncthreads();
  }

  /// The gradient of the state before the chunk.
  __device__ void go_back(const DeltaPlace<T>& at, const float* state_grad, float* to) {
    for (int row = 0; row < x.key_size; row += kDeltaRows) {
      OfState added;
      added.add(shared.state, {at.q(), x.key_size, x.key_stride()}, row,
                {scaled_o(at.head), x.value_size, x.value_size}, column, 0, c.count);
      added.add(shared.state, {at.k(), x.key_size, x.key_stride()}, row,
                {scaled_right(at.head), x.value_size, x.value_size}, column, 0, c.count);
      added.for_each([&](int i, int j, float sum) {
        if (row + i >= x.key_size || column + j >= x.value_size) return;
        const int64_t element = static_cast<int64_t>(row + i) * x.value_size + column + j;
        to[element] = c.kept * state_grad[element] + sum;
      });
    }
    __syncthreads();
  }
};

template <typename T>
__global__ void __launch_bounds__(kExactThreads)
    scan_chunks_back(const __grid_constant__ DeltaOperands x, ExactDelta scratch,
                     DeltaGrads grads) {
  __shared__ DeltaCoefficients c;
  __shared__ typename ExactReverseScan<T>::Shared shared;
  wait_for_earlier();
  const int head = static_cast<int>(blockIdx.x);
  ExactReverseScan<T> scan{x, scratch, grads,
                           c, shared,  static_cast<int>(blockIdx.y) * kDeltaColumns};
  DeltaPlace<T> at{x, x.num_chunks() - 1, head};
  float* last = scratch.state_grads + at.state_at(at.chunk);
  const int columns = min(kDeltaColumns, x.value_size - scan.column);
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(x.key_size) * columns; i += kExactThreads)
    last[i / columns * x.value_size + scan.column + i % columns] = 0;
  __syncthreads();
  for (; at.chunk >= 0; --at.chunk) {
    c.load(x, scratch.marks, at.chunk, head);
    const float* state_grad = scratch.state_grads + at.state_at(at.chunk);
    scan.solve(at, state_grad);
    if (at.chunk > 0) scan.go_back(at, state_grad, scratch.state_grads + at.state_at(at.chunk - 1));
  }
}

/// What a block of finish_chunks keeps in shared memory beside tiles.
struct ExactSums {
  float square[kDeltaRows][kDeltaRows + 1];
  float of_decay[kDeltaRows];
  float of_beta[kDeltaRows];
  float of_last[kDeltaRows];  // what each token adds to the last one's G
};

/// Gradients of one value head's q, k, decay and beta in a chunk.
template <typename T>
struct ExactFinish {
  using Alike = DeltaTile<AlongRows<T>, AlongRows<T>>;
  using OfOutputs = DeltaTile<AlongRows<T>, AlongRows<float>>;
  using OfRight = DeltaTile<AlongRows<float>, AlongRows<float>>;
  using ByRows = DeltaTile<AlongRows<float>, AcrossRows<T>>;
  using ByColumns = DeltaTile<AcrossRows<float>, AcrossRows<T>>;
  union Shared {
    typename Alike::Shared alike;
    typename OfOutputs::Shared outputs;
    typename OfRight::Shared right;
    typename ByRows::Shared rows;
    typename ByColumns::Shared columns;
  };

  const DeltaOperands& x;
  const ExactDelta& scratch;
  const DeltaGrads& grads;
  const DeltaPlace<T> at;
  DeltaCoefficients& c;
  ExactSums& own;
  Shared& shared;

  __device__ int64_t stride() const { return x.value_stride(); }
  __device__ AlongRows<T> grad_o() const {
    return {static_cast<const T*>(grads.o) + at.value_at(), c.count, stride()};
  }
  __device__ AlongRows<float> written() const {
    return {scratch.written + at.value_at(), c.count, stride()};
  }
  __device__ AlongRows<float> of_right() const {
    return {scratch.of_right + at.value_at(), c.count, stride()};
  }
  __device__ AlongRows<T> keys() const { return {at.k(), c.count, x.key_stride()}; }
  __device__ float* p() const { return scratch.p + at.square_at(); }
  __device__ float* of_p() const { return scratch.square + at.square_at(); }
  __device__ float* of_a() const { return scratch.inverse + at.square_at(); }
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }

  /// The sum over row i of own.square; by the first 64 threads.
  __device__ float row_sum(int i, int end = kDeltaRows) const {
    float sum = 0;
    for (int j = 0; j < end; ++j) sum += own.square[i][j];
    return sum;
  }
  /// own.square has gradients of logarithms of factors exp(G_i - G_j).
  __device__ void add_of_differences() {
    __syncthreads();
    const int i = thread();
    if (i < kDeltaRows) {
      float sum = row_sum(i);
      for (int j = 0; j < kDeltaRows; ++j) sum -= own.square[j][i];
      own.of_decay[i] += sum;
    }
    __syncthreads();
  }

  /// Gradients of P: scaled for the products with k into p(), with q into of_p().
  __device__ void add_of_p() {
    OfOutputs tile;
    tile.add(shared.outputs, grad_o(), 0, written(), 0, 0, x.value_size);
    tile.for_each([&](int i, int j, float sum) {
      const int element = i * kDeltaRows + j;
      const float between = c.between(i, j);
      own.square[i][j] = between == 0 || i == j ? 0 : sum * p()[element];
      const float of_product = between == 0 ? 0 : sum * between;
      p()[element] = of_product * c.k_inverse[j];
      of_p()[element] = of_product * c.q_inverse[i];
    });
    add_of_differences();
  }

  /// Gradients of A: of the products k_i k_j, both ways, into of_a(), where the inverse was.
  __device__ void add_of_a() {
    OfRight of_inverse;
    of_inverse.add(shared.right, of_right(), 0, written(), 0, 0, x.value_size);
    Alike products;
    products.add(shared.alike, keys(), 0, keys(), 0, 0, x.key_size);
    const float* product_sums = &products.sums[0][0];
    int next = 0;
    of_inverse.for_each([&](int i, int j, float sum) {
      const float factor =
          i == j ? 0 : product_sums[next] * c.k_inverse[i] * c.k_inverse[j] * c.between(i, j);
      ++next;
      own.square[i][j] = factor == 0 ? 0 : -sum * factor;
    });
    __syncthreads();
    const int row = thread();
    if (row < kDeltaRows) own.of_beta[row] += row_sum(row);
    __syncthreads();
    for (int i = thread(); i < kDeltaSquare; i += kExactThreads)
      own.square[i / kDeltaRows][i % kDeltaRows] *= c.beta[i / kDeltaRows];
    add_of_differences();
    of_inverse.for_each([&](int i, int j, float sum) {
      const float between = i == j ? 0 : c.between(i, j);
      own.square[i][j] = between == 0 ? 0 : -sum * c.beta[i] * between;
    });
    __syncthreads();
    for (int element = thread(); element < kDeltaSquare; element += kExactThreads) {
      const int i = element / kDeltaRows;
      const int j = element % kDeltaRows;
      of_a()[element] = (own.square[i][j] + own.square[j][i]) * c.k_inverse[j];
    }
    __syncthreads();
  }

  /// Columns [first, first + 64) of q's gradients.
  __device__ void write_of_q(int first) {
    OfOutputs of_state;
    of_state.add(shared.outputs, grad_o(), 0,
                 {scratch.states + at.state_at(at.chunk), x.key_size, x.value_size}, first, 0,
                 x.value_size);
    ByRows of_keys;
    of_keys.add(shared.rows, {p(), kDeltaRows, kDeltaRows}, 0, {at.k(), x.key_size, x.key_stride()},
                first, 0, c.count);
    const float* key_sums = &of_keys.sums[0][0];
    int next = 0;
    float* to = scratch.of_q + (at.token() * x.heads + at.head) * x.key_size;
    of_state.for_each([&](int i, int j, float sum) {
      const float of_keys_too = key_sums[next++];
      const float of_read = sum * c.reads[i];
      const bool there = i < c.count && first + j < x.key_size;
      own.square[i][j] = 0;
      if (!there) return;
      own.square[i][j] =
          of_read * c.q_inverse[i] * static_cast<float>(at.q()[i * x.key_stride() + first + j]);
      to[static_cast<int64_t>(i) * x.heads * x.key_size + first + j] = of_read + of_keys_too;
    });
    __syncthreads();
    if (thread() < kDeltaRows) own.of_decay[thread()] += row_sum(thread());
    __syncthreads();
  }

  /// A product of rows with a state [Dk, Dv]: of each sum, times its row's factor, that times k.
  template <typename Tile>
  __device__ void weigh_with_keys(Tile& tile, int first, const float* factors) {
    float* sums = &tile.sums[0][0];
    int next = 0;
    tile.for_each([&](int i, int j, float sum) {
      const bool there = i < c.count && first + j < x.key_size;
      const float scaled = there ? sum * factors[i] : 0;
      sums[next++] = scaled;
      own.square[i][j] = there ? scaled * c.k_inverse[i] *
                                     static_cast<float>(at.k()[i * x.key_stride() + first + j])
                               : 0;
    });
    __syncthreads();
  }

  /// Columns [first, first + 64) of k's gradients.
  __device__ void write_of_k(int first) {
    const int row = thread();
    OfRight of_new;
    of_new.add(shared.right, written(), 0,
               {scratch.state_grads + at.state_at(at.chunk), x.key_size, x.value_size}, first, 0,
               x.value_size);
    weigh_with_keys(of_new, first, c.writes);
    if (row < c.count - 1) {  // the last one's factor is 1
      const float sum = row_sum(row);
      own.of_decay[row] -= sum;
      own.of_last[row] += sum;
    }
    __syncthreads();
    OfRight of_old;
    of_old.add(shared.right, of_right(), 0,
               {scratch.states + at.state_at(at.chunk), x.key_size, x.value_size}, first, 0,
               x.value_size);
    weigh_with_keys(of_old, first, c.reads);
    if (row < kDeltaRows) {
      const float sum = row_sum(row);
      own.of_beta[row] -= sum;
      own.of_decay[row] -= c.beta[row] * sum;
    }
    __syncthreads();
    ByColumns of_queries;
    of_queries.add(shared.columns, {of_p(), kDeltaRows, kDeltaRows}, 0,
                   {at.q(), x.key_size, x.key_stride()}, first, 0, c.count);
    ByRows of_keys;
    of_keys.add(shared.rows, {of_a(), kDeltaRows, kDeltaRows}, 0,
                {at.k(), x.key_size, x.key_stride()}, first, 0, c.count);
    const float* old_sums = &of_old.sums[0][0];
    const float* query_sums = &of_queries.sums[0][0];
    const float* key_sums = &of_keys.sums[0][0];
    int next = 0;
    float* to = scratch.of_k + (at.token() * x.heads + at.head) * x.key_size;
    of_new.for_each([&](int i, int j, float sum) {
      const float total = sum - c.beta[i] * old_sums[next] + query_sums[next] + key_sums[next];
      ++next;
      if (i < c.count && first + j < x.key_size)
        to[static_cast<int64_t>(i) * x.heads * x.key_size + first + j] = total;
    });
  }

  /// Of the state that is kept: its product with the gradient of that behind, a sum of the block.
  __device__ float kept_product() {
    const float* state = scratch.states + at.state_at(at.chunk);
    const float* grad = scratch.state_grads + at.state_at(at.chunk);
    float sum = 0;
    for (int64_t i = thread(); c.kept != 0 && i < at.state_size(); i += kExactThreads)
      sum += state[i] * grad[i];
    float* sums = &own.square[0][0];
    __syncthreads();
    sums[thread()] = sum;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < kExactThreads; ++i) total += sums[i];
    return total * c.kept;
  }

  /// Of v in beta (v - ...).
  __device__ void add_of_values() {
    const int lane = thread() % 32;
    for (int i = thread() / 32; i < c.count; i += kExactThreads / 32) {
      const float* grad = scratch.of_right + at.value_at() + i * stride();
      const T* value = at.v() + i * stride();
      float sum = 0;
      for (int j = lane; j < x.value_size; j += 32) sum += grad[j] * static_cast<float>(value[j]);
      sum = sum_lanes(sum);
      if (lane == 0) own.of_beta[i] += sum;
    }
    __syncthreads();
  }

  /// REQUIRES all else.
  __device__ void write_gates(float of_kept) {
    const int i = thread();
    if (i < c.count) {
      float sum = 0;
      for (int j = i; j < c.count; ++j)
        if (c.starts[j] == c.starts[i]) sum += own.of_decay[j];
      if (c.starts[i] == c.starts[c.count - 1]) {
        sum += of_kept;
        for (int j = 0; j < c.count; ++j) sum += own.of_last[j];
      }
      const int64_t gate = (at.token() + i) * x.heads + at.head;
      grads.decay[gate] = sum;
      grads.beta[gate] = own.of_beta[i];
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kExactThreads)
    finish_chunks(const __grid_constant__ DeltaOperands x, ExactDelta scratch, DeltaGrads grads) {
  __shared__ DeltaCoefficients c;
  __shared__ ExactSums own;
  __shared__ typename ExactFinish<T>::Shared shared;
  wait_for_earlier();
  const DeltaPlace<T> at{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)};
  if (threadIdx.x < kDeltaRows)
    own.of_decay[threadIdx.x] = own.of_beta[threadIdx.x] = own.of_last[threadIdx.x] = 0;
  c.load(x, scratch.marks, at.chunk, at.head);
  ExactFinish<T> finish{x, scratch, grads, at, c, own, shared};
  finish.add_of_p();
  finish.add_of_a();
  for (int first = 0; first < x.key_size; first += kDeltaRows) {
    finish.write_of_q(first);
    finish.write_of_k(first);
  }
  finish.add_of_values();
  finish.write_gates(finish.kept_product());
}

}  // namespace

void launch_exact_delta_backward(const DeltaOperands& x, const ExactDelta& scratch,
                                 const DeltaGrads& grads, cudaStream_t stream) {
  if (x.tokens == 0) return;
  const auto chunks = static_cast<unsigned>(num_delta_chunks(x.tokens));
  const auto heads = static_cast<unsigned>(x.heads);
  const auto columns = static_cast<unsigned>(divide_up(x.value_size, kDeltaColumns));
  with_type(x.dtype, [&]<typename T>() {
    launch_early(scan_chunks_back<T>, {dim3(heads, columns), kExactThreads}, stream, x, scratch,
                 grads);
    launch_early(finish_chunks<T>, {dim3(chunks, heads), kExactThreads}, stream, x, scratch, grads);
  });
  launch_delta_unit_grads(x, scratch.marks,
                          {.of_q = scratch.of_q, .of_k = scratch.of_k, .q = grads.q, .k = grads.k},
                          stream);
}

}  // namespace tessera::cuda
