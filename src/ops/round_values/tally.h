#pragma once

#include <cstdint>

namespace tessera {

/// What roundings by delayed scales count, for each operand, in a row of I64: sums over what was
/// rounded, but for the largest magnitude. A value that is rounded several times counts as often,
/// so that of the counts only shares mean something.
enum class TallyColumn : int64_t {
  kAmax,       ///< the largest finite magnitude: the bits of an F32
  kValues,     ///< how many values there were
  kSaturated,  ///< of these, how many were finite and beyond the largest number
  kNonFinite,  ///< and how many were NaN or infinite
};
inline constexpr int64_t kTallyColumns = 4;

/// The operands that one value may be, of several products.
inline constexpr int64_t kMostPlaces = 8;

}  // namespace tessera
