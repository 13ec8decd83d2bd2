#pragma once

#include <cstdint>

#include "core/slice.h"

namespace tessera {

/// How a ring of R ranks shares the B rows of S tokens of a micro-batch so that causal attention
/// costs each of them the same: each row is cut into 2R equal chunks, and rank r holds chunks r and
/// 2R - 1 - r (Megatron-Core's context parallelism; Llama 3, section 3.3.2). Its tokens lie rows
/// one after the other, chunks in order. A ring of one holds all tokens in order.
struct Zigzag {
  int64_t num_rows = 1;    ///< B
  int64_t row_length = 1;  ///< S; a multiple of 2R where R > 1
  int64_t ring = 1;        ///< R

  int64_t num_tokens() const { return num_rows * row_length; }
  int64_t tokens_per_rank() const { return num_tokens() / ring; }
  /// The most runs that for_each_run visits.
  int64_t max_runs() const { return ring == 1 ? 1 : 2 * num_rows; }
  bool divides() const { return ring == 1 || row_length % (2 * ring) == 0; }

  /// Calls visit(IndexRange) for the runs of neighbouring tokens that rank `rank` holds, in order,
  /// chunks that touch being one run. Tokens are numbered through all rows.
  template <typename Visit>
  void for_each_run(int64_t rank, const Visit& visit) const;

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

}  // namespace tessera
