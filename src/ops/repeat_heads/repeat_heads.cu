#include "ops/cuda/vector.cuh"
#include "ops/repeat_heads/repeat_heads_kernels.h"

namespace tessera::cuda {
namespace {

/// Both go over the vectors of the side without copies.
template <typename T, int kWidth>
struct Sides {
  int num_heads;
  int head_size;
  int times;
  Divider head_vectors;
  const T* in;
  T* out;

  __device__ int64_t once(int64_t row, uint32_t vector) const {
    return row * num_heads * head_size + vector * kWidth;
  }
  /// The first copy; the others follow `head_size` apart.
  __device__ int64_t copies(int64_t row, uint32_t vector) const {
    const uint32_t head = head_vectors.quotient(vector);
    return (row * num_heads + head) * times * head_size +
           (vector - head * head_vectors.divisor()) * kWidth;
  }
};

template <typename T, int kWidth>
struct RepeatMap : Sides<T, kWidth> {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 8;
  using Loaded = Pack<T, kWidth>;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return load_pack<kWidth>(this->in + this->once(row, vector));
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    T* to = this->out + this->copies(row, vector);
    for (int copy = 0; copy < this->times; ++copy)
      cuda::store_once(to + static_cast<int64_t>(copy) * this->head_size, loaded);
  }
};

template <typename T, int kWidth>
struct SumMap : Sides<T, kWidth> {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 4;
  using Loaded = Floats<kWidth>;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const T* from = this->in + this->copies(row, vector);
    Floats<kWidth> total = {};
#pragma unroll 8
    for (int copy = 0; copy < this->times; ++copy) {
      const Floats<kWidth> term =
          cuda::load<kWidth>(from + static_cast<int64_t>(copy) * this->head_size);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[i] += term[i];
    }
    return total;
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& total) const {
    cuda::store(this->out + this->once(row, vector), total);
  }
};

template <template <typename, int> typename Map>
void launch(const HeadCopies& call, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.head_size) && are_aligned(call.in, call.out);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(Map<T, kWidth>{{call.num_heads, call.head_size, call.times,
                               Divider(call.head_size / kWidth), static_cast<const T*>(call.in),
                               static_cast<T*>(call.out)}},
               call.rows, int64_t{call.num_heads} * call.head_size / kWidth, stream);
  });
}

}  // namespace

void launch_repeat_heads(const HeadCopies& call, cudaStream_t stream) {
  launch<RepeatMap>(call, stream);
}

void launch_sum_heads(const HeadCopies& call, cudaStream_t stream) {
  launch<SumMap>(call, stream);
}

}  // namespace tessera::cuda
