#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// Numbers of few bits: those of FP8, and E2M1 of four bits (0, 0.5, 1, 1.5, 2, 3, 4, 6).
enum class NarrowNumber : uint8_t { kE4M3, kE5M2, kE2M1 };
std::string_view narrow_name(NarrowNumber number);
/// The largest magnitude.
float largest_of(NarrowNumber number);

/// How an operand of a product is rounded: neighbours share a scale, by which what is rounded is
/// multiplied again. The sum of the product runs along a row or a column of the operand.
struct CastSpec {
  NarrowNumber number = NarrowNumber::kE4M3;
  /// Neighbours along the sum that share a scale, and across it; 0: all of the group's.
  int64_t length = 0;
  int64_t width = 1;
  /// Scales are themselves rounded to E4M3, under one power of two of the whole group (NVFP4);
  /// otherwise they are powers of two.
  bool nested = false;
  /// Rounded up as often as the number is near the upper one, instead of to the nearest.
  bool stochastic = false;
  /// The neighbours are rotated by a Hadamard matrix with random signs first: what is rounded keeps
  /// its products with what was rotated alike. Neighbours are then 16 of a single row or column.
  bool rotated = false;
  /// The one scale of all values is given: it is of earlier values, so that these may be beyond the
  /// largest number.
  bool delayed = false;

  bool operator==(const CastSpec&) const = default;
  /// "e4m3 1x128", "e2m1 1x16 nested rotated stochastic"; across the sum first, "all" for 0.
  /// "e4m3 delayed".
  std::string to_string() const;
};

/// Values of one Hadamard matrix.
inline constexpr int64_t kRotatedLength = 16;

}  // namespace tessera
