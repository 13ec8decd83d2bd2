// Backward, of all chunks at once, in two kernels: what products give, which are the gradients of
// the squares and what reaches queries and keys through states; then what reaches them through
// pairs of tokens, and with it everything else.
#include <type_traits>

#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/gated_delta/delta_rounded_tile.cuh"
#include "ops/kda/kda_pair_grads.cuh"
#include "ops/kda/kda_place.cuh"

namespace tessera::cuda {
namespace {

/// What blocks that multiply keep in shared memory beside tiles.
struct KdaSums {
  float square[kDeltaRows][kDeltaRows + 1];
  float of_beta[kDeltaRows];
  int starts[kDeltaRows];  // INT32_MIN in rows that are not there

  /// By all threads of the block.
  template <typename T>
  __device__ void begin(const KdaPlace<T>& at, const KdaFinishScratch& scratch) {
    const auto i = static_cast<int>(threadIdx.x);
    if (i < kDeltaRows) {
      of_beta[i] = 0;
      starts[i] = i < at.count() ? at.start(scratch.marks, i) : INT32_MIN;
    }
    __syncthreads();
  }
  template <typename T>
  __device__ void end(const KdaPlace<T>& at, float* to) const {
    const auto i = static_cast<int>(threadIdx.x);
    if (i < at.count()) to[(at.token() + i) * at.x.heads + at.head] = of_beta[i];
  }
  __device__ bool joins(int i, int j) const { return starts[i] == starts[j]; }

  /// Takes the sums of the square's rows from beta's gradients.
  __device__ void subtract_from_beta() {
    __syncthreads();
    const auto i = static_cast<int>(threadIdx.x);
    if (i < kDeltaRows) {
      float sum = 0;
      for (int j = 0; j < kDeltaRows; ++j) sum += square[i][j];
      of_beta[i] -= sum;
    }
    __syncthreads();
  }
};

/// The products of one head in a chunk. `Kept`: what scans left; rounded, it is multiplied on
/// tensor cores, which changes no value but the order of sums.
template <typename T, typename Kept>
struct KdaProducts {
  static constexpr bool kRounded = std::is_same_v<Kept, BFloat16>;
  using OfOutputs =
      std::conditional_t<kRounded, RoundedDeltaTile, DeltaTile<AlongRows<T>, AlongRows<Kept>>>;
  using OfRight =
      std::conditional_t<kRounded, RoundedDeltaTile, DeltaTile<AlongRows<Kept>, AlongRows<Kept>>>;
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
  __device__ AlongRows<Kept> states(const void* from) const {
    return {static_cast<const Kept*>(from) + at.state_at(at.chunk), x.key_size, x.value_size};
  }

  /// Gradients of P and A where these were, and what beta has of them.
  __device__ void find_squares() {
    float* p = scratch.p + at.square_at();
    float* a = scratch.a + at.square_at();
    OfOutputs of_outputs;
    of_outputs.add(shared.outputs, grad_o(), 0, values(scratch.written), 0, 0, x.value_size);
    of_outputs.for_each([&](int i, int j, float sum) {
      p[i * kDeltaRows + j] = i < count && j <= i && own.joins(i, j) ? sum : 0;
    });
    OfRight of_right;
    of_right.add(shared.right, values(scratch.of_right), 0, values(scratch.written), 0, 0,
                 x.value_size);
    of_right.for_each([&](int i, int j, float sum) {
      const bool there = i < count && j < i && own.joins(i, j);
      own.square[i][j] = there ? sum * a[i * kDeltaRows + j] : 0;
      a[i * kDeltaRows + j] = there ? -sum * at.beta(i) : 0;
    });
    own.subtract_from_beta();
  }

  /// What beta has of v in beta (v - ...).
  __device__ void add_values() {
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

  /// Elements [first, first + 64) of what reaches queries, readers' keys and writers' keys through
  /// the states, the latter where the gradients of decays will be.
  __device__ void find_elements(int first) {
    OfOutputs of_queries;
    of_queries.add(shared.outputs, grad_o(), 0, states(scratch.states), first, 0, x.value_size);
    const auto visit = [&](int i, int j, const auto& take) {
      if (i < count && first + j < x.key_size) take(at.key_at() + i * x.key_stride() + first + j);
    };
    const auto reads = [&](int i, int64_t key) {
      return own.starts[i] < at.token() ? expf(scratch.sums[key]) : 0;
    };
    of_queries.for_each([&](int i, int j, float sum) {
      visit(i, j, [&](int64_t key) { scratch.of_q[key] = sum * reads(i, key); });
    });
    OfRight of_readers;
    of_readers.add(shared.right, values(scratch.of_right), 0, states(scratch.states), first, 0,
                   x.value_size);
    of_readers.for_each([&](int i, int j, float sum) {
      own.square[i][j] = 0;
      visit(i, j, [&](int64_t key) {
        const float of_reader = sum * reads(i, key);
        own.square[i][j] = of_reader * static_cast<float>(static_cast<const T*>(x.k)[key]) *
                           at.of_row(scratch.marks.k_inverse, i);
        scratch.of_k[key] = -at.beta(i) * of_reader;
      });
    });
    own.subtract_from_beta();
    OfRight of_writers;
    of_writers.add(shared.right, values(scratch.written), 0, states(scratch.state_grads), first, 0,
                   x.value_size);
    const int last_start = own.starts[count - 1];
    of_writers.for_each([&](int i, int j, float sum) {
      visit(i, j, [&](int64_t key) {
        const float last = scratch.sums[key + (count - 1 - i) * x.key_stride()];
        grads.decay[key] = own.starts[i] == last_start ? sum * expf(last - scratch.sums[key]) : 0;
      });
    });
  }

  /// What the last of the sums of decays has of the elements' state that is kept: its product with
  /// the gradient of that behind.
  __device__ void find_of_last() {
    constexpr int kAtOnce = 4;  // rows that are under way
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float* kept = scratch.kept + at.kept_at();
    const Kept* state = static_cast<const Kept*>(scratch.states) + at.state_at(at.chunk);
    const Kept* grad = static_cast<const Kept*>(scratch.state_grads) + at.state_at(at.chunk);
    for (int first = static_cast<int>(threadIdx.x) / 32 * kAtOnce; first < x.key_size;
         first += kExactThreads / 32 * kAtOnce) {
      float sums[kAtOnce] = {};
      for (int v = lane; v < x.value_size; v += 32) {
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          const int64_t element =
              static_cast<int64_t>(min(first + r, x.key_size - 1)) * x.value_size + v;
          sums[r] += static_cast<float>(state[element]) * static_cast<float>(grad[element]);
        }
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const float sum = sum_lanes(sums[r]);
        if (lane != 0 || first + r >= x.key_size) continue;
        // A state that is not kept is another sequence's, whatever it holds.
        scratch.of_last[at.kept_at() + first + r] =
            kept[first + r] == 0 ? 0 : sum * kept[first + r];
      }
    }
  }
};

template <typename T, typename Kept>
__global__ void __launch_bounds__(kExactThreads)
    find_products(const __grid_constant__ DeltaOperands x, KdaFinishScratch scratch,
                  DeltaGrads grads) {
  __shared__ KdaSums own;
  __shared__ typename KdaProducts<T, Kept>::Shared shared;
  wait_for_earlier();
  const KdaPlace<T> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  own.begin(at, scratch);
  KdaProducts<T, Kept> products{x, scratch, grads, at, own, shared, at.count()};
  products.find_squares();
  products.add_values();
  for (int first = 0; first < x.key_size; first += kDeltaRows) products.find_elements(first);
  products.find_of_last();
  own.end(at, grads.beta);
}

template <typename T>
__global__ void __launch_bounds__(kExactThreads, 4)
    finish_elements(const __grid_constant__ DeltaOperands x, KdaFinishScratch scratch,
                    DeltaGrads grads) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<PairShared*>(memory);
  wait_for_earlier();
  const KdaPlace<T> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  shared.load_from(at, scratch);
  const int element = static_cast<int>(blockIdx.z) * kExactThreads + static_cast<int>(threadIdx.x);
  if (element >= x.key_size) return;
  KdaElement<T> own{x, scratch, grads, at, shared, at.count(), element};
  own.add_pairs();
  own.finish();
}

template <typename T, typename Kept>
void launch(const DeltaOperands& x, const KdaFinishScratch& scratch, const DeltaGrads& grads,
            cudaStream_t stream) {
  const auto count = static_cast<unsigned>(num_delta_chunks(x.tokens));
  const auto heads = static_cast<unsigned>(x.heads);
  const auto slices = static_cast<unsigned>(divide_up(x.key_size, kExactThreads));
  launch_early(find_products<T, Kept>, {dim3(count, heads), kExactThreads}, stream, x, scratch,
               grads);
  check(cudaFuncSetAttribute(finish_elements<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(PairShared)));
  launch_early(finish_elements<T>, {dim3(count, heads, slices), kExactThreads, sizeof(PairShared)},
               stream, x, scratch, grads);
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
