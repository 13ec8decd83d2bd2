#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"

namespace tessera {

/// What keeps the digits for which a BF16 weight has no room.
enum class MasterKind : uint8_t {
  kF32,         ///< a copy of the weight in F32, of which the weight is the rounded one
  kRemainder,   ///< the lower 16 bits of such a copy, whose upper ones the weight tells
  kNone,        ///< nothing: each update rounds the weight stochastically
  kRemainder8,  ///< of a remainder the upper 8 bits, rounded stochastically
};

/// How a moment is kept. F16 and FP8 have a scale for each block of elements (moment_code.h): the
/// squares of gradients of one model differ by more powers of two than F16 has alone.
enum class MomentKind : uint8_t { kF32, kBF16, kF16, kFp8 };

/// Averages of gradients and of their squares.
enum class Moment : uint8_t { kFirst, kSecond };

/// Elements of a row that share a scale, the last block of a row having fewer. So each row is kept
/// as if it were alone, and ranks that cut a parameter between rows keep the same bits.
constexpr int64_t kMomentBlock = 128;

constexpr int64_t count_moment_blocks(int64_t columns) {
  return (columns + kMomentBlock - 1) / kMomentBlock;
}

constexpr bool has_scales(MomentKind kind) {
  return kind == MomentKind::kF16 || kind == MomentKind::kFp8;
}

/// "f32", "bf16", "f16", "fp8".
constexpr std::string_view moment_name(MomentKind kind) {
  constexpr std::string_view kNames[] = {"f32", "bf16", "f16", "fp8"};
  return kNames[static_cast<size_t>(kind)];
}

/// The type of its elements; that of scales is U8.
constexpr DType moment_dtype(MomentKind kind) {
  constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kU8};
  return kTypes[static_cast<size_t>(kind)];
}

/// How an optimizer keeps its state between steps; it computes in F32 in any case. Moments of fewer
/// bits are rounded stochastically, since an average that moves by less than half a digit would
/// otherwise stand still.
struct StateFormats {
  MomentKind first_moment = MomentKind::kF32;
  MomentKind second_moment = MomentKind::kF32;
  MasterKind master = MasterKind::kF32;

  bool operator==(const StateFormats&) const = default;
  bool are_plain() const { return *this == StateFormats(); }
  bool have_scales() const { return has_scales(first_moment) || has_scales(second_moment); }
  /// The formats of a parameter of this rank: vectors, which are few, keep F32 in place of blocks.
  StateFormats of_rank(int rank) const {
    const auto kept = [&](MomentKind kind) {
      return rank < 2 && has_scales(kind) ? MomentKind::kF32 : kind;
    };
    return {kept(first_moment), kept(second_moment), master};
  }
  /// What is kept beside a weight of this type; nothing where it is its own master.
  MasterKind master_of(DType weight) const {
    return is_low_precision(weight) ? master : MasterKind::kNone;
  }
};

/// "master", "remainder" or "remainder8": what the state is called, behind its parameter's name.
/// Empty for kNone.
inline std::string_view master_suffix(MasterKind kind) {
  switch (kind) {
    case MasterKind::kF32:
      return "master";
    case MasterKind::kRemainder:
      return "remainder";
    case MasterKind::kRemainder8:
      return "remainder8";
    case MasterKind::kNone:
      break;
  }
  return "";
}

constexpr bool is_remainder(MasterKind kind) {
  return kind == MasterKind::kRemainder || kind == MasterKind::kRemainder8;
}

/// The type of that state. REQUIRES that it is kept.
inline DType master_dtype(MasterKind kind) {
  if (kind == MasterKind::kRemainder8) return DType::kU8;
  return kind == MasterKind::kRemainder ? DType::kU16 : DType::kF32;
}

}  // namespace tessera
