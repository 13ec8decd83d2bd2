#pragma once

#include "core/dtype.h"
#include "ops/expert_sizes.h"
#include "ops/grouped_matmul/grouped_tile_model.h"

/// Which grouped products run on tensor cores, in tiles, where their matrices begin at multiples of
/// 16 bytes; plain kernels take all others.
namespace tessera::cuda {

struct GroupedShape {
  DType dtype = DType::kF32;
  int64_t num_experts = 0;
  int64_t wide = 0;     ///< columns of the weight
  int64_t largest = 0;  ///< the most rows of it that one expert has
};

/// TMA wants rows of matrices that are multiples of 16 bytes.
constexpr bool runs_in_tiles(const GroupedShape& shape) {
  constexpr int64_t kChunk = 8;
  return shape.dtype == DType::kBF16 && shape.num_experts <= kGroupedMaxExperts && shape.wide > 0 &&
         shape.wide % kChunk == 0 && shape.largest % kChunk == 0;
}

/// What y = a · W_e asks for besides: copies along the reduction that end where an expert's part
/// of the narrow matrix ends.
inline bool parts_in_tiles(const ExpertSizes& sizes) {
  return std::ranges::all_of(sizes.values(), [largest = sizes.largest()](int64_t size) {
    return size == largest || size % kGroupedReduction == 0;
  });
}

}  // namespace tessera::cuda
