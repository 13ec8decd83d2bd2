#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>

#include "core/tensor.h"
#include "hf/tensors/hf_tensors.h"

namespace tessera {

/// A tensor "NAME" [E, K, N] that is stored as MXFP4, as gpt-oss's experts are (OCP Microscaling
/// Formats v1.0, sections 5.2 and 5.3): "NAME_blocks" U8 [E, N, K / 32, 16] has two E2M1 numbers a
/// byte, the one with the lower k in the lower half, and "NAME_scales" U8 [E, N, K / 32] has the
/// E8M0 exponent, biased by 127, of the power of two by which each 32 of them are multiplied.
struct PackedTensor {
  const HfTensor* blocks = nullptr;
  const HfTensor* scales = nullptr;
};

inline constexpr int64_t kMxfp4Block = 32;

/// The E2M1 numbers in the order of their codes.
inline constexpr std::array<float, 16> kE2m1 = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                                4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                                -2.0F, -3.0F, -4.0F, -6.0F};
/// 2^(code - 127), as E8M0 has it; NaN of 255.
float e8m0_number(uint8_t code);

/// Whether a tensor of a file holds a matrix of that shape as bytes of two E2M1 numbers, the one of
/// the lower column in the lower half.
bool holds_pairs(const SafetensorsEntry& entry, const Shape& matrix);

std::string packed_blocks_name(const std::string& name);
std::string packed_scales_name(const std::string& name);

/// The parts of a tensor, where its blocks are there; the scales may be missing.
std::optional<PackedTensor> find_packed(const HfTensors& tensors, const std::string& name);

/// Throws UserError unless the parts are those of a tensor of that shape.
void check_packed(const PackedTensor& packed, const std::string& name, const Shape& shape);

/// Elements [begin, begin + to.size()) of the tensor, some of its rows of N. Exact: products of two
/// powers of two and at most two bits. A scale of 255 gives NaN.
void read_packed(const PackedTensor& packed, int64_t begin, std::span<float> to);

}  // namespace tessera
