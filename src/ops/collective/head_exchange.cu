// Heads of one rank after the other, for an exchange of heads for tokens: copies alone.
#include "ops/collective/head_exchange_kernels.h"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

/// Goes over the rows of [P · T, part] in words of W. There a part's rows are neighbours; in
/// [T, P · part] row t of part p is row t · P + p.
template <typename W, bool kSplit>
struct ExchangeMap {
  static constexpr int kUnroll = 4;
  static constexpr int kBlocks = 4;
  using Loaded = W;

  const W* from;
  W* to;
  int64_t num_parts;
  int64_t num_rows;
  int64_t words;  // of a part

  __device__ __forceinline__ int64_t interleaved(int64_t row) const {
    return row % num_rows * num_parts + row / num_rows;
  }
  __device__ __forceinline__ Loaded load(int64_t row, uint32_t word) const {
    return from[(kSplit ? interleaved(row) : row) * words + word];
  }
  __device__ __forceinline__ void store(int64_t row, uint32_t word, const Loaded& value) const {
    to[(kSplit ? row : interleaved(row)) * words + word] = value;
  }
};

template <typename W, bool kSplit>
void launch(const RowParts& parts, const void* from, void* to, cudaStream_t stream) {
  const int64_t words = parts.part_bytes / static_cast<int64_t>(sizeof(W));
  launch_map(ExchangeMap<W, kSplit>{static_cast<const W*>(from), static_cast<W*>(to),
                                    parts.num_parts, parts.num_rows, words},
             RowCount{parts.num_parts * parts.num_rows}, words, stream);
}

template <bool kSplit>
void launch_any(const RowParts& parts, const void* from, void* to, cudaStream_t stream) {
  if (parts.num_rows == 0) return;
  const bool vectors = parts.part_bytes % 16 == 0 && are_aligned(from, to);
  const auto run = vectors                     ? launch<uint4, kSplit>
                   : parts.part_bytes % 2 == 0 ? launch<uint16_t, kSplit>
                                               : launch<uint8_t, kSplit>;
  run(parts, from, to, stream);
}

}  // namespace

void launch_split_rows(const RowParts& parts, const void* from, void* to, cudaStream_t stream) {
  launch_any<true>(parts, from, to, stream);
}

void launch_join_rows(const RowParts& parts, const void* from, void* to, cudaStream_t stream) {
  launch_any<false>(parts, from, to, stream);
}

}  // namespace tessera::cuda
