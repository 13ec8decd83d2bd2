#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hf/family/block_scales.h"
#include "hf/family/hf_tensors.h"
#include "hf/family/tensor_map.h"

namespace tessera {

/// The scales of a matrix; null where it has none.
const HfTensor* find_scales(const HfTensors& tensors, const std::string& name);

/// The names of all scales of E4M3 matrices.
std::vector<std::string> list_scales(const HfTensors& tensors);

/// Throws UserError unless each mapped tensor is F32, BF16 or F16, an E4M3 matrix with scales that
/// fit `blocks`, or, with `mxfp4`, packed (family/packed_tensors.h).
void check_stored_types(const TensorMap& map, const HfTensors& tensors,
                        const std::optional<BlockScales>& blocks, bool mxfp4 = false);

/// Elements [begin, begin + count) of an E4M3 matrix as the F32 numbers that they stand for.
void read_scaled(const HfTensor& matrix, const HfTensor& scales, const BlockScales& blocks,
                 int64_t begin, std::span<float> to);

}  // namespace tessera
