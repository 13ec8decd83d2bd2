#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// See WindowChoice.
struct WindowChoices {
  int64_t num_tokens;
  int window;
  int rate;
  int entries;
  const int32_t* positions;
  const int32_t* chosen;  ///< null: all entries
  int32_t* rows;
};
void launch_window_choice(const WindowChoices& call, cudaStream_t stream);

}  // namespace tessera::cuda
