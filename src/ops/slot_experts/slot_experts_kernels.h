#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

constexpr int kSlotMaxExperts = 1024;

/// See SlotExperts.
struct SlotFilling {
  int64_t num_slots;
  int num_experts;
  int64_t slot_rows;
  const int64_t* counts;  ///< [S, N]
  int32_t* expert_of;     ///< [S, B]
};
void launch_slot_experts(const SlotFilling& filling, cudaStream_t stream);

}  // namespace tessera::cuda
