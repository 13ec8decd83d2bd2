#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

constexpr int kDispatchMaxRanks = 1024;  ///< of EP

/// See DispatchPlan. Rank e · ETP + t stands at coordinates (e, t).
struct DispatchPlanning {
  int ep_size;
  int etp_size;
  int ep_rank;
  int etp_rank;
  int64_t max_received;
  int64_t max_gathered;
  const int64_t* counts;  ///< [EP·ETP, E]
  int64_t* send_rows;
  int64_t* receive_rows;
  int64_t* received;
  int64_t* gather_rows;
  int64_t* gathered;
  int32_t* expert_idx;
  int64_t* run_starts;  ///< scratch memory [ETP · EP · local experts + 1]
  int32_t first_experts[kDispatchMaxRanks + 1];
};
void launch_dispatch_plan(const DispatchPlanning& plan, cudaStream_t stream);

}  // namespace tessera::cuda
