#pragma once

#include "ops/cuda/fail.cuh"
#include "ops/route_map/route_map_kernels.h"

/// What the kernels that sort assignments share.
namespace tessera::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kLanes = 32;

__device__ __forceinline__ int64_t count_of(const RouteAssignments& a) {
  return a.num_tokens == nullptr ? a.bound : *a.num_tokens * a.top_k;
}

/// The local index of an expert, -1 where it has none here.
__device__ __forceinline__ int local_expert(const RouteAssignments& a, int expert) {
  if (expert < -1 || expert >= a.num_experts) fail("route_map: no expert has the index", expert);
  const int local = expert - a.first_local;
  return local >= 0 && local < a.num_local ? local : -1;
}

template <typename T>
__device__ __forceinline__ T warp_inclusive_sum(T value, int lane) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

}  // namespace tessera::cuda
