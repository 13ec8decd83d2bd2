#pragma once

#include "core/zigzag.h"
#include "ops/attention/attention_blocks.h"

namespace tessera::attention {

/// Calls visit(TokenSpan) for the parts of sequences that a rank of the ring holds, in the order of
/// its rows.
template <typename Visit>
void for_each_span_of(const Zigzag& tokens, std::span<const int32_t> cu_seqlens, int64_t rank,
                      const Visit& visit) {
  int64_t first_row = 0;
  tokens.for_each_run(cu_seqlens, rank, [&](const IndexRange& run) {
    for_each_span(cu_seqlens, run, first_row, visit);
    first_row += run.count;
  });
}

/// Work lists for one rank's queries, empty yet.
inline WorkList take_ring_work(const AttentionOperator& op, const Zigzag& tokens,
                               int64_t num_sequences, Carver& carver) {
  return {num_sequences, tokens.max_runs(num_sequences) + num_sequences, tokens.tokens_per_rank(),
          block_positions(op), carver};
}

/// Makes rank `source`'s keys those in hand.
inline void take_keys(WorkList& work, const Zigzag& tokens, std::span<const int32_t> cu_seqlens,
                      int64_t source) {
  work.clear_keys();
  for_each_span_of(tokens, cu_seqlens, source, [&](const TokenSpan& span) { work.add_keys(span); });
}

}  // namespace tessera::attention
