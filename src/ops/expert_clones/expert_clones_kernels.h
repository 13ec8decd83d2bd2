#pragma once

#include <cuda_runtime.h>

#include "ops/expert_clones/clone_split.h"

namespace tessera::cuda {

constexpr int kCloneMaxSlots = 1024;
/// Of ranks, and of one rank's experts.
constexpr int kCloneMaxIndex = 65536;

/// See ClonePlan and ClonePlanWorkspace.
struct ClonePlanning {
  const int64_t* counts;  ///< [P, E]
  int num_experts;
  int num_ranks;
  int rank;
  int slots_per_rank;
  int64_t* slots;
  int64_t* begins;
  int64_t* ends;
  int64_t* rest;
  int64_t* loads;
  int64_t* filled;
  int64_t* quotas;
};
void launch_clone_plan(const ClonePlanning& plan, cudaStream_t stream);

/// See CloneRoute.
struct CloneRouting {
  int64_t num_assignments;
  const int32_t* expert_idx;
  const int32_t* row_of;
  const int64_t* offsets;
  int num_slots;
  const int64_t* slots;
  const int64_t* begins;
  const int64_t* ends;
  int32_t* home_idx;
  int32_t* clone_idx;
};
void launch_clone_route(const CloneRouting& routing, cudaStream_t stream);

/// See AddClones.
struct CloneSum {
  const float* returned;
  const int64_t* slots;
  int num_slots;
  int64_t first_expert;
  int64_t num_local;
  int64_t block;  ///< elements of an expert
  float* sum;
};
void launch_add_clones(const CloneSum& sum, cudaStream_t stream);

}  // namespace tessera::cuda
