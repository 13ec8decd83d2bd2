#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"

namespace tessera {

/// What keeps the digits for which a BF16 weight has no room.
enum class MasterKind : uint8_t {
  kF32,        ///< a copy of the weight in F32, of which the weight is the rounded one
  kRemainder,  ///< the lower 16 bits of such a copy, whose upper ones the weight tells
  kNone,       ///< nothing: each update rounds the weight stochastically
};

/// How an optimizer keeps its state between steps; it computes in F32 in any case. BF16 moments are
/// rounded stochastically, since an average that moves by less than half a digit would stand still.
struct StateFormats {
  DType first_moment = DType::kF32;   ///< F32 or BF16
  DType second_moment = DType::kF32;  ///< likewise
  MasterKind master = MasterKind::kF32;

  bool operator==(const StateFormats&) const = default;
  bool are_plain() const { return *this == StateFormats(); }
  /// What is kept beside a weight of this type; nothing where it is its own master.
  MasterKind master_of(DType weight) const {
    return is_low_precision(weight) ? master : MasterKind::kNone;
  }
};

/// "master" or "remainder": what the state is called, behind its parameter's name. Empty for kNone.
inline std::string_view master_suffix(MasterKind kind) {
  switch (kind) {
    case MasterKind::kF32:
      return "master";
    case MasterKind::kRemainder:
      return "remainder";
    case MasterKind::kNone:
      break;
  }
  return "";
}

/// The type of that state. REQUIRES that it is kept.
inline DType master_dtype(MasterKind kind) {
  return kind == MasterKind::kRemainder ? DType::kU16 : DType::kF32;
}

}  // namespace tessera
