#pragma once

#include "ops/paged_attention/kept_rows.h"
#include "ops/paged_attention/kept_rows_args.h"

namespace tessera::cuda {

/// Of an operator whose cu_seqlens and page_table are the inputs from `first` on.
inline KeptTokensArgs kept_tokens(KeptRows kept, const KernelArgs& args, int positions, int first) {
  KeptTokensArgs tokens{.packed = kept == KeptRows::kPacked,
                        .positions = args.in(positions).as<int32_t>()};
  if (kept != KeptRows::kPaged) return tokens;
  const Tensor& table = args.in(first + 1);
  tokens.cu_seqlens = args.in(first).as<int32_t>();
  tokens.page_table = table.as<int32_t>();
  tokens.num_sequences = static_cast<int>(table.shape[0]);
  tokens.pages_per_sequence = static_cast<int>(table.shape[1]);
  return tokens;
}

}  // namespace tessera::cuda
