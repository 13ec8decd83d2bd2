#include "ops/attention/attention_blocks.h"

namespace tessera::attention {

void check_cu_seqlens(const AttentionOperator& op, std::span<const int32_t> cu_seqlens,
                      int64_t num_tokens) {
  check_shape(op, cu_seqlens.front() == 0, "cu_seqlens starts at {}, expected 0",
              cu_seqlens.front());
  check_shape(op, cu_seqlens.back() == num_tokens, "cu_seqlens ends at {}, expected the {} tokens",
              cu_seqlens.back(), num_tokens);
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    check_shape(op, cu_seqlens[i - 1] <= cu_seqlens[i],
                "cu_seqlens falls from {} to {} at index {}; it must not decrease",
                cu_seqlens[i - 1], cu_seqlens[i], i);
  }
}

int64_t max_blocks(int64_t num_tokens, int64_t num_seqs, int64_t positions) {
  return num_tokens / positions + num_seqs;
}

int64_t cut_blocks(QueryBlock first, int64_t num_queries, int64_t positions, QueryBlock* blocks) {
  int64_t count = 0;
  for (int64_t done = 0; done < num_queries; done += positions) {
    QueryBlock& block = blocks[count++];
    block = first;
    block.first_query += done;
    block.first_position += done;
    block.num_positions = std::min(positions, num_queries - done);
  }
  return count;
}

ThreadScratch::ThreadScratch(std::span<std::byte> workspace, int64_t used, int64_t bytes_per_thread)
    : base(workspace.data() + used), bytes(bytes_per_thread) {
  const int64_t fitting = (static_cast<int64_t>(workspace.size()) - used) / bytes_per_thread;
  ensure(fitting >= 1, "attention: {} bytes of workspace, {} used, {} needed by a thread",
         workspace.size(), used, bytes_per_thread);
  num_threads = static_cast<int>(std::min<int64_t>(fitting, omp_get_max_threads()));
}

}  // namespace tessera::attention
