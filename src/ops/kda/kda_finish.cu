// Backward, of all chunks at once: the gradients of the squares, what comes of these through pairs
// of tokens, and everything else.
#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx/fast_exp.cuh"
#include "ops/kda/kda_place.cuh"

namespace tessera::cuda {
namespace {

/// What blocks that finish chunks keep in shared memory beside tiles.
struct KdaSums {
  float square[kDeltaRows][kDeltaRows + 1];
  float of_beta[kDeltaRows];
  float of_last[kDeltaRows];  // of G_C, of 64 elements of keys
  int starts[kDeltaRows];     // INT32_MIN in rows that are not there

  /// By all threads of the block; beta's gradients begin with `from` [T, N], or 0 where that is
  /// null.
  template <typename T>
  __device__ void begin(const KdaPlace<T>& at, const KdaFinishScratch& scratch, const float* from) {
    const auto i = static_cast<int>(threadIdx.x);
    const int count = at.count();
    if (i < kDeltaRows) {
      of_beta[i] = i < count && from != nullptr ? at.of_row(from, i) : 0;
      starts[i] = i < count ? at.start(scratch.marks, i) : INT32_MIN;
    }
    __syncthreads();
  }
  template <typename T>
  __device__ void end(const KdaPlace<T>& at, float* to) const {
    const auto i = static_cast<int>(threadIdx.x);
    if (i < at.count()) to[(at.token() + i) * at.x.heads + at.head] = of_beta[i];
  }
  __device__ bool joins(int i, int j) const { return starts[i] == starts[j]; }

  /// Adds `sign` times the sums of the square's rows.
  __device__ void add_of_beta(float sign) {
    __syncthreads();
    const auto i = static_cast<int>(threadIdx.x);
    if (i < kDeltaRows) {
      float sum = 0;
      for (int j = 0; j < kDeltaRows; ++j) sum += square[i][j];
      of_beta[i] += sign * sum;
    }
    __syncthreads();
  }
};

/// What finishing one head's chunk reads, and the products that it makes of it: of gradients of o,
/// and of what scans left.
template <typename T, typename Kept>
struct KdaChunk {
  using OfOutputs = DeltaTile<AlongRows<T>, AlongRows<Kept>>;
  using OfRight = DeltaTile<AlongRows<Kept>, AlongRows<Kept>>;
  union Shared {
    typename OfOutputs::Shared outputs;
    typename OfRight::Shared right;
  };

  const DeltaOperands& x;
  const KdaFinishScratch& scratch;
  const DeltaGrads& grads;
  const KdaPlace<T> at;
  KdaSums& own;
  Shared& shared;
  int count;

  __device__ AlongRows<T> grad_o() const {
    return {static_cast<const T*>(grads.o) + at.value_at(), count, x.value_stride()};
  }
  __device__ AlongRows<Kept> values(const void* from) const {
    return {static_cast<const Kept*>(from) + at.value_at(), count, x.value_stride()};
  }
};

/// The gradients of one head's squares and, with those, of beta in a chunk.
template <typename T, typename Kept>
struct KdaSquareGrads : KdaChunk<T, Kept> {
  using Chunk = KdaChunk<T, Kept>;
  using Chunk::at;
  using Chunk::count;
  using Chunk::grads;
  using Chunk::own;
  using Chunk::scratch;
  using Chunk::shared;
  using Chunk::x;
  using typename Chunk::OfOutputs;
  using typename Chunk::OfRight;

  /// Gradients of P and A where these were.
  __device__ void find() {
    float* p = scratch.p + at.square_at();
    float* a = scratch.a + at.square_at();
    OfOutputs of_outputs;
    of_outputs.add(shared.outputs, this->grad_o(), 0, this->values(scratch.written), 0, 0,
                   x.value_size);
    of_outputs.for_each([&](int i, int j, float sum) {
      p[i * kDeltaRows + j] = i < count && j <= i && own.joins(i, j) ? sum : 0;
    });
    OfRight of_right;
    of_right.add(shared.right, this->values(scratch.of_right), 0, this->values(scratch.written), 0,
                 0, x.value_size);
    of_right.for_each([&](int i, int j, float sum) {
      const bool there = i < count && j < i && own.joins(i, j);
      own.square[i][j] = there ? sum * a[i * kDeltaRows + j] : 0;
      a[i * kDeltaRows + j] = there ? -sum * at.beta(i) : 0;
    });
    own.add_of_beta(-1);
  }

  /// Of v in beta (v - ...).
  __device__ void add_of_values() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < count; i += kExactThreads / 32) {
      const Kept* grad =
          static_cast<const Kept*>(scratch.of_right) + at.value_at() + i * x.value_stride();
      const T* value = at.v() + i * x.value_stride();
      float sum = 0;
      for (int j = lane; j < x.value_size; j += 32)
        sum += static_cast<float>(grad[j]) * static_cast<float>(value[j]);
      sum = sum_lanes(sum);
      if (lane == 0) own.of_beta[i] += sum;
    }
    __syncthreads();
  }
};

template <typename T, typename Kept>
__global__ void __launch_bounds__(kExactThreads)
    find_square_grads(const __grid_constant__ DeltaOperands x, KdaFinishScratch scratch,
                      DeltaGrads grads) {
  __shared__ KdaSums own;
  __shared__ typename KdaSquareGrads<T, Kept>::Shared shared;
  wait_for_earlier();
  const KdaPlace<T> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  own.begin(at, scratch, nullptr);
  KdaSquareGrads<T, Kept> squares{{x, scratch, grads, at, own, shared, at.count()}};
  squares.find();
  squares.add_of_values();
  own.end(at, grads.beta);
}

constexpr int kPairRows = 8;  // tokens that a thread holds at a time, as readers and as writers

/// What reaches queries and keys from the squares' gradients, of one element, which is a thread's:
/// a pair's factor exp(G_i - G_j) serves the reader's query and key and the writer's key.
template <typename T>
struct KdaPairGrads {
  const DeltaOperands& x;
  const KdaFinishScratch& scratch;
  const KdaPlace<T>& at;
  float2 (&of_squares)[kDeltaRows][kDeltaRows];    // of P and A
  float (&of_writers)[kDeltaRows][kExactThreads];  // a column is its thread's alone
  int count;
  int64_t first;  // of the thread's element

  struct Token {
    float sum;  // in units of log 2
    float q;
    float k;
  };
  __device__ Token token(int i) const {
    if (i >= count) return {0, 0, 0};
    const int64_t key = first + i * x.key_stride();
    return {scratch.sums[key] * kLog2E,
            load<1>(static_cast<const T*>(x.q) + key)[0] * kda_query_scale(x) *
                at.of_row(scratch.marks.q_inverse, i),
            load<1>(static_cast<const T*>(x.k) + key)[0] * at.of_row(scratch.marks.k_inverse, i)};
  }

  /// Writes what reaches readers to of_q and of_k.
  __device__ void add(float* to_writers) {
    for (int j = 0; j < kDeltaRows; ++j) of_writers[j][threadIdx.x] = 0;
    for (int i = 0; i < count; i += kPairRows) {
      Token readers[kPairRows];
#pragma unroll
      for (int r = 0; r < kPairRows; ++r) readers[r] = token(i + r);
      float of_query[kPairRows] = {};
      float of_key[kPairRows] = {};
      for (int j = 0; j <= i; j += kPairRows) add_tile(i, j, readers, of_query, of_key);
#pragma unroll
      for (int r = 0; r < kPairRows; ++r) {
        if (i + r >= count) break;
        const int64_t key = first + (i + r) * x.key_stride();
        scratch.of_q[key] = of_query[r];
        scratch.of_k[key] = of_key[r];
      }
    }
    for (int j = 0; j < count; ++j)
      to_writers[first + j * x.key_stride()] = of_writers[j][threadIdx.x];
  }

  /// Squares' gradients are zero where no token reads what the other writes.
  __device__ void add_tile(int i, int j, const Token (&readers)[kPairRows],
                           float (&of_query)[kPairRows], float (&of_key)[kPairRows]) {
    Token writers[kPairRows];
#pragma unroll
    for (int w = 0; w < kPairRows; ++w) writers[w] = token(j + w);
#pragma unroll
    for (int w = 0; w < kPairRows; ++w) {
      const Token& writer = writers[w];
      float of_writer = 0;
#pragma unroll
      for (int r = 0; r < kPairRows; ++r) {
        const float2 of_pair = of_squares[i + r][j + w];
        const float left = fast_exp2(fminf(readers[r].sum - writer.sum, 0));
        const float key = writer.k * left;
        of_query[r] = fmaf(of_pair.x, key, of_query[r]);
        of_key[r] = fmaf(of_pair.y, key, of_key[r]);
        of_writer = fmaf(fmaf(of_pair.x, readers[r].q, of_pair.y * readers[r].k), left, of_writer);
      }
      of_writers[j + w][threadIdx.x] += of_writer;
    }
  }
};

struct PairShared {
  float2 of_squares[kDeltaRows][kDeltaRows];
  float of_writers[kDeltaRows][kExactThreads];
};

template <typename T>
__global__ void __launch_bounds__(kExactThreads)
    find_pair_grads(const __grid_constant__ DeltaOperands x, KdaFinishScratch scratch,
                    DeltaGrads grads) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<PairShared*>(memory);
  wait_for_earlier();
  const KdaPlace<T> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  const int64_t squares = at.square_at();
  for (int i = static_cast<int>(threadIdx.x); i < kDeltaSquare; i += kExactThreads)
    shared.of_squares[i / kDeltaRows][i % kDeltaRows] = {scratch.p[squares + i],
                                                         scratch.a[squares + i]};
  __syncthreads();
  const int element = static_cast<int>(blockIdx.z) * kExactThreads + static_cast<int>(threadIdx.x);
  if (element >= x.key_size) return;
  KdaPairGrads<T> pairs{
      x, scratch, at, shared.of_squares, shared.of_writers, at.count(), at.key_at() + element};
  pairs.add(grads.decay);
}

/// The other gradients of one head's q, k, decays and beta in a chunk.
template <typename T, typename Kept>
struct KdaFinish : KdaChunk<T, Kept> {
  using Chunk = KdaChunk<T, Kept>;
  using Chunk::at;
  using Chunk::count;
  using Chunk::grads;
  using Chunk::own;
  using Chunk::scratch;
  using Chunk::shared;
  using Chunk::x;
  using typename Chunk::OfOutputs;
  using typename Chunk::OfRight;

  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  __device__ AlongRows<Kept> states(const void* from) const {
    return {static_cast<const Kept*>(from) + at.state_at(at.chunk), x.key_size, x.value_size};
  }
  __device__ float unit_q(int i, int element) const {
    return static_cast<float>(at.q()[i * x.key_stride() + element]) * kda_query_scale(x) *
           at.of_row(scratch.marks.q_inverse, i);
  }
  __device__ float unit_k(int i, int element) const {
    return static_cast<float>(at.k()[i * x.key_stride() + element]) *
           at.of_row(scratch.marks.k_inverse, i);
  }

  /// Elements [first, first + 64) of the gradients of q, k and G, the latter's where those of g
  /// will be and those of writers through pairs are; what reaches G_C through keys takes k_rest's
  /// place. REQUIRES find_pair_grads.
  __device__ void write_elements(int first) {
    OfOutputs of_queries;
    of_queries.add(shared.outputs, this->grad_o(), 0, states(scratch.states), first, 0,
                   x.value_size);
    OfRight of_readers;
    of_readers.add(shared.right, this->values(scratch.of_right), 0, states(scratch.states), first,
                   0, x.value_size);
    OfRight of_writers;
    of_writers.add(shared.right, this->values(scratch.written), 0, states(scratch.state_grads),
                   first, 0, x.value_size);
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
      const float sum = scratch.sums[key];
      const float last = scratch.sums[at.key_at() + (count - 1) * x.key_stride() + element];
      const float reads = own.starts[i] < at.token() ? expf(sum) : 0;
      const float writes = own.starts[i] == last_start ? expf(last - sum) : 0;
      const float k = unit_k(i, element);
      own.square[i][j] = reader_sum * k * reads;
      scratch.of_rest[key] = k * writes * writer_sum;
      const float of_query = query_sum * reads + scratch.of_q[key];
      const float of_reader = scratch.of_k[key] - at.beta(i) * reader_sum * reads;
      const float of_writer = writer_sum * writes + grads.decay[key];
      scratch.of_q[key] = of_query;
      scratch.of_k[key] = of_reader + of_writer;
      grads.decay[key] = unit_q(i, element) * of_query + k * (of_reader - of_writer);
    });
    own.add_of_beta(-1);
  }

  /// Of the elements' state that is kept, its product with the gradient of that behind.
  __device__ void find_of_last(int first) {
    const int lane = thread() % 32;
    const float* kept = scratch.kept + at.kept_at();
    for (int j = thread() / 32; j < kDeltaRows; j += kExactThreads / 32) {
      float sum = 0;
      if (first + j < x.key_size && kept[first + j] != 0) {
        const int64_t row = static_cast<int64_t>(first + j) * x.value_size;
        const Kept* state = static_cast<const Kept*>(scratch.states) + at.state_at(at.chunk) + row;
        const Kept* grad =
            static_cast<const Kept*>(scratch.state_grads) + at.state_at(at.chunk) + row;
        for (int v = lane; v < x.value_size; v += 32)
          sum += static_cast<float>(state[v]) * static_cast<float>(grad[v]);
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
      const float* of_rest = scratch.of_rest + at.key_at() + element;
      float sum = own.of_last[thread()];
      for (int i = 0; i < count; ++i) sum += of_rest[i * x.key_stride()];
      for (int i = count - 1; i >= 0; --i) {
        if (i + 1 < count && !own.joins(i, i + 1)) sum = 0;
        sum += of_decay[i * x.key_stride()];
        of_decay[i * x.key_stride()] = sum;
      }
    }
    __syncthreads();
  }
};

template <typename T, typename Kept>
__global__ void __launch_bounds__(kExactThreads)
    finish_chunks(const __grid_constant__ DeltaOperands x, KdaFinishScratch scratch,
                  DeltaGrads grads) {
  __shared__ KdaSums own;
  __shared__ typename KdaFinish<T, Kept>::Shared shared;
  wait_for_earlier();
  const KdaPlace<T> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  own.begin(at, scratch, grads.beta);
  KdaFinish<T, Kept> finish{{x, scratch, grads, at, own, shared, at.count()}};
  for (int first = 0; first < x.key_size; first += kDeltaRows) {
    finish.write_elements(first);
    finish.find_of_last(first);
    finish.sum_decays(first);
  }
  own.end(at, grads.beta);
}

template <typename T, typename Kept>
void launch(const DeltaOperands& x, const KdaFinishScratch& scratch, const DeltaGrads& grads,
            cudaStream_t stream) {
  const auto count = static_cast<unsigned>(num_delta_chunks(x.tokens));
  const auto heads = static_cast<unsigned>(x.heads);
  const auto slices = static_cast<unsigned>(divide_up(x.key_size, kExactThreads));
  launch_early(find_square_grads<T, Kept>, {dim3(count, heads), kExactThreads}, stream, x, scratch,
               grads);
  check(cudaFuncSetAttribute(find_pair_grads<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(PairShared)));
  launch_early(find_pair_grads<T>, {dim3(count, heads, slices), kExactThreads, sizeof(PairShared)},
               stream, x, scratch, grads);
  launch_early(finish_chunks<T, Kept>, {dim3(count, heads), kExactThreads}, stream, x, scratch,
               grads);
}

}  // namespace

void launch_kda_finish(const DeltaOperands& x, const KdaFinishScratch& scratch,
                       const DeltaGrads& grads, cudaStream_t stream) {
  if (scratch.in_bf16) {
    launch<BFloat16, BFloat16>(x, scratch, grads, stream);
  } else {
    with_type(x.dtype, [&]<typename T>() { launch<T, float>(x, scratch, grads, stream); });
  }
  launch_delta_unit_grads(x, scratch.marks,
                          {.of_q = scratch.of_q, .of_k = scratch.of_k, .q = grads.q, .k = grads.k},
                          stream);
}

}  // namespace tessera::cuda
