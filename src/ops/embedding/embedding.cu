#include "ops/embedding/embedding_kernels.h"

#include "ops/cuda/vector.cuh"
#include "ops/embedding/embedding_device.cuh"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct EmbeddingMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 8;
  using Loaded = Pack<T, kWidth>;

  TokenRows tokens;
  int64_t hidden;
  const T* table;
  T* out;

  __device__ Loaded load(int64_t token, uint32_t vector) const {
    const int64_t row = row_of(tokens, tokens.tokens[token]);
    if (row < 0) return {};
    return load_pack<kWidth>(table + row * hidden + vector * kWidth);
  }
  __device__ void store(int64_t token, uint32_t vector, const Loaded& loaded) const {
    cuda::store_once(out + token * hidden + vector * kWidth, loaded);
  }
};

}  // namespace

void launch_embedding(const EmbeddingCall& call, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.hidden) && are_aligned(call.table, call.out);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(EmbeddingMap<T, kWidth>{call.tokens, call.hidden, static_cast<const T*>(call.table),
                                       static_cast<T*>(call.out)},
               call.tokens.rows, call.hidden / kWidth, stream);
  });
}

}  // namespace tessera::cuda
