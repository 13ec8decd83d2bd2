#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hf/config/block_scales.h"
#include "hf/tensors/hf_tensors.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {

/// A matrix of fewer bits than its numbers have, each block with a scale: E4M3 with the blocks of
/// the folder, or E2M1 in pairs (holds_pairs) with blocks of 1 x 32, as DeepSeek-V4's experts are
/// published. Scales are F32, BF16, F16, or bytes: exponents of E8M0.
struct ScaledMatrix {
  const HfTensor* codes = nullptr;
  const HfTensor* scales = nullptr;
  BlockScales blocks;
  bool is_pairs = false;
};

/// The scales of a matrix; null where it has none.
const HfTensor* find_scales(const HfTensors& tensors, const std::string& name);

/// The names of all scales of such matrices.
std::vector<std::string> list_scales(const HfTensors& tensors);

/// A tensor of the map as it is stored; empty where its elements are its values. check_stored_types
/// must have passed.
std::optional<ScaledMatrix> find_scaled(const HfTensors& tensors, const MappedTensor& tensor,
                                        const std::optional<BlockScales>& blocks);

/// Throws UserError unless each mapped tensor is F32, BF16 or F16, a matrix with scales that fit
/// `blocks`, or, with `mxfp4`, packed (family/packed_tensors.h).
void check_stored_types(const TensorMap& map, const HfTensors& tensors,
                        const std::optional<BlockScales>& blocks, bool mxfp4 = false);

/// Elements [begin, begin + count) of the matrix as the F32 numbers that they stand for.
void read_scaled(const ScaledMatrix& matrix, int64_t begin, std::span<float> to);

}  // namespace tessera
