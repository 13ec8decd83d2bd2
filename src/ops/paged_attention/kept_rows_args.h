#pragma once

#include <cstdint>

namespace tessera::cuda {

/// What kernels for GPUs find tokens' sequences by (KeptRows).
struct KeptTokensArgs {
  bool packed = true;
  const int32_t* positions = nullptr;
  const int32_t* cu_seqlens = nullptr;  ///< of pages, as the others
  const int32_t* page_table = nullptr;
  int num_sequences = 0;
  int pages_per_sequence = 0;
};

}  // namespace tessera::cuda
