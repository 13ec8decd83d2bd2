#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/paged_attention/kept_rows_args.h"

namespace tessera::cuda {

/// See WindowChoice.
struct WindowChoices {
  int64_t num_tokens;
  int window;
  int rate;
  int entries;
  KeptTokensArgs tokens;
  int64_t first_entry;
  const int32_t* chosen;  ///< null: all entries
  int32_t* rows;
};
void launch_window_choice(const WindowChoices& call, cudaStream_t stream);

}  // namespace tessera::cuda
