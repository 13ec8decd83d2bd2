#include "ops/attention/attention_blocks.h"

namespace tessera::attention {
inline namespace TESSERA_CPU_LEVEL {

WorkList::WorkList(int64_t num_sequences, int64_t max_spans, int64_t max_tokens, int64_t positions,
                   Carver& carver)
    : sequences_(carver.take<SequenceWork>(num_sequences)),
      keys_(carver.take<TokenSpan>(max_spans)),
      blocks_(carver.take<QueryBlock>(max_tokens / positions + max_spans)),
      num_sequences_(num_sequences),
      positions_(positions) {
  if (sequences_ != nullptr) std::fill_n(sequences_, num_sequences, SequenceWork{});
}

void WorkList::add_queries(const TokenSpan& span) {
  IndexRange& range = sequences_[span.sequence].blocks;
  if (range.count == 0) range.begin = num_blocks_;
  for (int64_t position = span.begin; position < span.end; position += positions_) {
    blocks_[num_blocks_++] = {.sequence = span.sequence,
                              .first_query = span.row_of_zero + position,
                              .first_position = position,
                              .num_positions = std::min(positions_, span.end - position)};
    ++range.count;
  }
}

void WorkList::add_keys(const TokenSpan& span) {
  IndexRange& range = sequences_[span.sequence].keys;
  if (range.count == 0) range.begin = num_keys_;
  keys_[num_keys_++] = span;
  ++range.count;
}

void WorkList::clear_keys() {
  for (int64_t i = 0; i < num_keys_; ++i) sequences_[keys_[i].sequence].keys = {};
  num_keys_ = 0;
}

ThreadScratch::ThreadScratch(std::span<std::byte> memory, int64_t bytes_per_thread)
    : base(memory.data()), bytes(bytes_per_thread) {
  const int64_t fitting = static_cast<int64_t>(memory.size()) / bytes_per_thread;
  ensure(fitting >= 1, "attention: {} bytes of scratch memory, {} needed by a thread",
         memory.size(), bytes_per_thread);
  num_threads = static_cast<int>(std::min<int64_t>(fitting, omp_get_max_threads()));
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera::attention
