#pragma once

#include "ops/paged_attention/kept_rows.h"

namespace tessera::cuda {

/// What kernels for GPUs find tokens' sequences by (KeptRows).
struct KeptTokensArgs {
  bool packed = true;
  const int32_t* positions = nullptr;
  const int32_t* cu_seqlens = nullptr;  ///< of pages, as the others
  const int32_t* page_table = nullptr;
  int num_sequences = 0;
  int pages_per_sequence = 0;

  static KeptTokensArgs of(KeptRows kept, const KernelArgs& args, int positions, int first) {
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
};

}  // namespace tessera::cuda
