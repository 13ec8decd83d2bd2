// Copies of rows alone.
#include "ops/cuda/vector.cuh"
#include "ops/deal_tokens/deal_tokens_kernels.h"

namespace tessera::cuda {
namespace {

/// Where a token of the sequences stands in the order of the ring.
struct DealtPlace {
  Divider row_length;
  Divider chunk_length;
  uint32_t ring;
  uint32_t rank_tokens;  // of all rows

  explicit DealtPlace(const DealtRows& rows)
      : row_length(static_cast<uint32_t>(rows.row_length)),
        chunk_length(static_cast<uint32_t>(rows.row_length / (2 * rows.ring))),
        ring(static_cast<uint32_t>(rows.ring)),
        rank_tokens(static_cast<uint32_t>(rows.num_rows * rows.row_length / rows.ring)) {}

  __device__ __forceinline__ int64_t of(uint32_t token) const {
    const uint32_t row = row_length.quotient(token);
    const uint32_t in_row = token - row * row_length.divisor();
    const uint32_t chunk = chunk_length.quotient(in_row);
    const uint32_t in_chunk = in_row - chunk * chunk_length.divisor();
    const bool is_second = chunk >= ring;
    const uint32_t rank = is_second ? 2 * ring - 1 - chunk : chunk;
    const uint32_t half = 2 * row + (is_second ? 1 : 0);
    return int64_t{rank} * rank_tokens + int64_t{half} * chunk_length.divisor() + in_chunk;
  }
};

/// Goes over the tokens of the sequences in words of W.
template <typename W, bool kDeals>
struct DealMap {
  static constexpr int kUnroll = 4;
  static constexpr int kBlocks = 4;
  using Loaded = W;

  DealtPlace place;
  const W* from;
  W* to;
  int64_t words;  // of a token

  __device__ __forceinline__ int64_t dealt(int64_t token) const {
    return place.of(static_cast<uint32_t>(token));
  }
  __device__ __forceinline__ Loaded load(int64_t token, uint32_t word) const {
    return from[(kDeals ? token : dealt(token)) * words + word];
  }
  __device__ __forceinline__ void store(int64_t token, uint32_t word, const Loaded& value) const {
    to[(kDeals ? dealt(token) : token) * words + word] = value;
  }
};

template <typename W, bool kDeals>
void launch(const DealtRows& rows, cudaStream_t stream) {
  const int64_t words = rows.token_bytes / static_cast<int64_t>(sizeof(W));
  launch_map(DealMap<W, kDeals>{DealtPlace(rows), static_cast<const W*>(rows.from),
                                static_cast<W*>(rows.to), words},
             RowCount{rows.num_rows * rows.row_length}, words, stream);
}

template <bool kDeals>
void launch_any(const DealtRows& rows, cudaStream_t stream) {
  const bool vectors = rows.token_bytes % 16 == 0 && are_aligned(rows.from, rows.to);
  const auto run = vectors ? launch<uint4, kDeals> : launch<uint16_t, kDeals>;
  run(rows, stream);
}

}  // namespace

void launch_deal_tokens(const DealtRows& rows, cudaStream_t stream) {
  launch_any<true>(rows, stream);
}

void launch_collect_tokens(const DealtRows& rows, cudaStream_t stream) {
  launch_any<false>(rows, stream);
}

}  // namespace tessera::cuda
