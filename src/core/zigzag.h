#pragma once

#include <cstdint>
#include <span>

#include "core/slice.h"

namespace tessera {

/// How a ring of R ranks shares the B rows of S tokens of a micro-batch so that causal attention
/// costs each of them the same: each row is cut into 2R equal chunks, and rank r holds chunks r and
/// 2R - 1 - r (Megatron-Core's context parallelism; Llama 3, section 3.3.2). Its tokens lie rows
/// one after the other, chunks in order. A ring of one holds all tokens in order. Where the packed
/// sequences are dealt out one by one, each is such a row, of a length of its own.
struct Zigzag {
  int64_t num_rows = 1;    ///< B
  int64_t row_length = 1;  ///< S; a multiple of 2R where R > 1
  int64_t ring = 1;        ///< R
  /// Sequences are dealt out one by one, each of a multiple of 2R tokens; B and S say how many
  /// tokens there are.
  bool by_sequence = false;

  int64_t num_tokens() const { return num_rows * row_length; }
  int64_t tokens_per_rank() const { return num_tokens() / ring; }
  /// The most runs that are visited where there are so many sequences.
  int64_t max_runs(int64_t num_sequences) const {
    if (ring == 1) return 1;
    return 2 * (by_sequence ? num_sequences : num_rows);
  }
  bool divides() const { return ring == 1 || row_length % (2 * ring) == 0; }

  /// Calls visit(IndexRange) for the runs of neighbouring tokens that rank `rank` holds, in order,
  /// chunks that touch being one run. Tokens are numbered through all rows.
  template <typename Visit>
  void for_each_run(int64_t rank, const Visit& visit) const;
  /// The same of the sequences that cu_seqlens bounds, where these are dealt out one by one.
  template <typename Visit>
  void for_each_run(std::span<const int32_t> cu_seqlens, int64_t rank, const Visit& visit) const;

  bool operator==(const Zigzag&) const = default;
};

template <typename Visit>
void Zigzag::for_each_run(int64_t rank, const Visit& visit) const {
  if (ring == 1) return visit(IndexRange{0, num_tokens()});
  const int64_t chunk = row_length / (2 * ring);
  IndexRange run;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (const int64_t part : {rank, 2 * ring - 1 - rank}) {
      const int64_t begin = row * row_length + part * chunk;
      if (begin != run.end()) {
        if (run.count > 0) visit(run);
        run = {begin, 0};
      }
      run.count += chunk;
    }
  }
  if (run.count > 0) visit(run);
}

template <typename Visit>
void Zigzag::for_each_run(std::span<const int32_t> cu_seqlens, int64_t rank,
                          const Visit& visit) const {
  if (!by_sequence || ring == 1) return for_each_run(rank, visit);
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    const int64_t begin = cu_seqlens[i - 1];
    const int64_t chunk = (cu_seqlens[i] - begin) / (2 * ring);
    if (chunk == 0) continue;
    const bool touch = rank + 1 == ring;
    visit(IndexRange{begin + rank * chunk, touch ? 2 * chunk : chunk});
    if (!touch) visit(IndexRange{begin + (2 * ring - 1 - rank) * chunk, chunk});
  }
}

}  // namespace tessera
