#pragma once

#include <algorithm>

#include "ops/ssd_scan/ssd_scan_kernels.h"

/// The scan of ssd_scan.h in its dual form (Transformers are SSMs, section 6) for BF16 on tensor
/// cores. A chunk is kSsdRows rows of the packed tokens. With L_t the sum of a chunk's logarithms
/// of decays up to token t, S what lies before the chunk and G the gradient of what lies behind it:
///   y_t = Σ_{s<=t} C_t·B_s exp(L_t - L_s) d_s x_s + exp(L_t) Sᵀ C_t + D x_t,
/// and all gradients are such products too. What tokens of one sequence give another is masked, so
/// memory follows from the number of tokens alone.
///
/// A head's columns are cut into slices of 64, the last one filled with zeros; states have 64 or
/// 128 rows, likewise. Slices of a group's heads follow one another.
namespace tessera::cuda {

constexpr int kSsdSlice = 64;
constexpr int kSsdTile = 16;  // of a chunk's squares, which are kept by such tiles
constexpr int kSsdTileValues = kSsdTile * kSsdTile;
constexpr int kSsdTileRows = kSsdRows / kSsdTile;
constexpr int kSsdTriangle = kSsdTileRows * (kSsdTileRows + 1) / 2 * kSsdTileValues;
constexpr int kSsdWalks = 256;     // blocks that go through segments at once, or more
constexpr int kSsdHeadBlock = 16;  // most heads whose gradients of B and C a block sums
constexpr int kMaxSsdDualRows = 128;

/// Whether the dual form takes these. Addresses must be multiples of 16 bytes.
inline bool takes_ssd_dual(DType dtype, int64_t head_size, int64_t state_size) {
  return dtype == DType::kBF16 && head_size % 8 == 0 && state_size % 8 == 0 &&
         state_size <= kMaxSsdDualRows;
}

/// Numbers of things, from the operator's sizes.
struct SsdDualSizes {
  int chunks;
  int segments;        ///< of chunks that a block goes through, one after the other
  int segment_chunks;  ///< of all but the last
  int group_pairs;     ///< of a group's slices
  int group_heads;
  int head_slices;
  int slices;       ///< of all heads
  int state_rows;   ///< 64 or 128
  int head_blocks;  ///< of a group
  int all_blocks;
  int64_t state_values;  ///< of a slice
};
inline SsdDualSizes ssd_dual_sizes(int64_t tokens, int heads, int groups, int head_size,
                                   int state_size) {
  const auto up = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  SsdDualSizes sizes{};
  sizes.chunks = static_cast<int>(num_ssd_chunks(tokens));
  sizes.group_heads = heads / groups;
  sizes.head_slices = up(head_size, kSsdSlice);
  sizes.slices = heads * sizes.head_slices;
  sizes.group_pairs = up(int64_t{sizes.group_heads} * sizes.head_slices, 2);
  const int wanted = up(kSsdWalks, int64_t{groups} * sizes.group_pairs);
  sizes.segment_chunks = std::max(up(sizes.chunks, wanted), 1);
  sizes.segments = up(sizes.chunks, sizes.segment_chunks);
  sizes.state_rows = state_size <= 64 ? 64 : 128;
  sizes.state_values = int64_t{sizes.state_rows} * kSsdSlice;
  sizes.head_blocks = up(sizes.group_heads, kSsdHeadBlock);
  sizes.all_blocks = groups * sizes.head_blocks;
  return sizes;
}

/// Scratch memory of both passes. Rows of chunks are [chunks, H, kSsdRows] F32, 0 beyond the tokens
/// unless said otherwise; squares are [chunks, G or head blocks, kSsdTriangle] F32: tiles on and
/// below the diagonal, row by row, each as the lanes of a warp hold its products.
struct SsdDual {
  int32_t* starts;      ///< [chunks·kSsdRows]: the first row of a token's sequence
  float* steps;         ///< d
  float* sums;          ///< L / ln 2, begun anew where a sequence begins
  float* reads;         ///< exp(L): of the state before the chunk; 0 where it is another sequence's
  float* ends;          ///< exp(L_last - L): of the state behind; 0 likewise
  float* writes;        ///< those times d
  float* kept;          ///< [chunks, H]: of the state before a chunk in that behind it
  float* products;      ///< squares of groups: C_t·B_s, masked
  float* segment;       ///< [segments, slices, state_rows, 64]: the states before segments
  float* segment_kept;  ///< [segments, H]
  void* states;         ///< BF16 [chunks, slices, state_rows, 64]: before the chunks
};

/// Scratch memory of the backward pass beside it.
struct SsdDualBackward {
  float* turned;       ///< as products, each tile transposed
  void* state_grads;   ///< BF16 [chunks, slices, state_rows, 64]: behind the chunks
  float* joined;       ///< [chunks, slices]: kept · S · G
  float* read_dots;    ///< rows of chunks: exp(L) C·(S g), g the gradient of y
  float* write_dots;   ///< exp(L_last - L) d B·(G x)
  float* row_sums;     ///< of Z_ts = C_t·B_s exp(L_t - L_s) d_s g_t·x_s over s
  float* column_sums;  ///< over t
  float* skips;        ///< g·x
  float* squares;      ///< of head blocks: exp(L_t - L_s) d_s g_t·x_s, summed over their heads
  float* of_b;         ///< [all blocks, chunks, kSsdRows, state_rows]: from the states' gradients
  float* of_c;         ///< from the states
  float* of_a_log;     ///< [chunks, H]: what chunks add to the gradients of heads' numbers
  float* of_skip;
  float* of_bias;
  float* partials;  ///< column_sums_bytes of H columns
};

void launch_ssd_dual(const SsdRows& x, const SsdDual& scratch, void* y, cudaStream_t stream);
void launch_ssd_dual_backward(const SsdRows& x, const SsdDual& scratch,
                              const SsdDualBackward& backward, const SsdGrads& grads,
                              cudaStream_t stream);

// The steps of which those consist.

/// All rows of chunks of SsdDual, and with `turned` not null that beside the products.
void launch_ssd_dual_marks(const SsdRows& x, const SsdDual& scratch, float* turned,
                           cudaStream_t stream);

/// The states before all chunks.
void launch_ssd_dual_states(const SsdRows& x, const SsdDual& scratch, cudaStream_t stream);
/// The gradients of those behind all chunks, after the states; `grad`: of y.
void launch_ssd_dual_state_grads(const SsdRows& x, const SsdDual& scratch,
                                 const SsdDualBackward& backward, const void* grad,
                                 cudaStream_t stream);

/// y; or, where `backward` is not null, the gradient of x from `grad`.
void launch_ssd_dual_rows(const SsdRows& x, const SsdDual& scratch, const SsdDualBackward* backward,
                          const void* grad, void* to, cudaStream_t stream);

/// What head blocks add to the gradients of B and C, with the dots.
void launch_ssd_dual_vectors(const SsdRows& x, const SsdDual& scratch,
                             const SsdDualBackward& backward, const void* grad,
                             cudaStream_t stream);
/// The squares of head blocks, with the sums of Z and the skips.
void launch_ssd_dual_squares(const SsdRows& x, const SsdDual& scratch,
                             const SsdDualBackward& backward, const void* grad,
                             cudaStream_t stream);
/// All gradients but that of x, from those.
void launch_ssd_dual_finish(const SsdRows& x, const SsdDual& scratch,
                            const SsdDualBackward& backward, const SsdGrads& grads,
                            cudaStream_t stream);

}  // namespace tessera::cuda
