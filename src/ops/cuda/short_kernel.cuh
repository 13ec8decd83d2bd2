#pragma once

#include "ops/cuda/dependent_launch.cuh"

namespace tessera::cuda {

/// Blocks of a kernel that takes some microseconds at most, whatever it computes, apart from
/// persistent kernels.
constexpr unsigned kShortBlocks = 2048;

/// let_next_begin, in a kernel of so few blocks that the launch of the next one, which is thus
/// under way meanwhile, takes a good part of its time. Of a larger one the last wave would leave
/// the next kernel's blocks uneven places.
__device__ __forceinline__ void let_next_begin_if_short() {
  if (gridDim.x * gridDim.y * gridDim.z <= kShortBlocks) let_next_begin();
}

}  // namespace tessera::cuda
