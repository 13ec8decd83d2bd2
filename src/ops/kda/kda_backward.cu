// Backward: the states' gradients from the last chunk to the first.
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

}  // namespace

void launch_kda_backward(const DeltaOperands& x, const KdaChunks& chunks, const DeltaGrads& grads,
                         cudaStream_t stream) {
  if (x.tokens == 0) return;
  const auto heads = static_cast<unsigned>(x.heads);
  const auto columns = static_cast<unsigned>(divide_up(x.value_size, kDeltaColumns));
  with_type(x.dtype, [&]<typename T>() {
    launch_early(scan_chunks_back<T>, {dim3(heads, columns), kExactThreads}, stream, x, chunks,
                 grads);
  });
  launch_kda_finish(x,
                    {.in_bf16 = false,
                     .marks = chunks.marks,
                     .sums = chunks.sums,
                     .kept = chunks.kept,
                     .p = chunks.p,
                     .a = chunks.a,
                     .written = chunks.written,
                     .of_right = chunks.of_right,
                     .states = chunks.states,
                     .state_grads = chunks.state_grads,
                     .of_q = chunks.q_kept,
                     .of_k = chunks.k_kept,
                     .of_last = chunks.k_rest},
                    grads, stream);
}

}  // namespace tessera::cuda
