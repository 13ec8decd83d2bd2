#pragma once

#include <cstdint>
#include <string>

#include "core/dtype.h"

namespace tessera {

/// How the elements of a format share scales, by which they are multiplied when they are read. Rows
/// are those of a tensor seen as a matrix: its last dim is a row.
struct ScaleLayout {
  enum class Kind : uint8_t {
    kNone,    ///< elements are the values
    kTensor,  ///< one F32 for all
    kRow,     ///< one F32 a row
    kBlock,   ///< one F32 for each block of `rows` × `columns` (DeepSeek-V3, section 3.3.2)
    kMx,      ///< one E8M0 for 32 neighbours of a row (OCP Microscaling Formats, 1.0)
    kNv,      ///< one E4M3 for 16 neighbours of a row, and one F32 for all (NVFP4)
  };
  Kind kind = Kind::kNone;
  int32_t rows = 1;  ///< of a block
  int32_t columns = 1;

  static ScaleLayout none() { return {}; }
  static ScaleLayout tensor() { return {.kind = Kind::kTensor}; }
  static ScaleLayout row() { return {.kind = Kind::kRow}; }
  /// Throws InternalError for sizes below 1.
  static ScaleLayout block(int32_t rows, int32_t columns);
  static ScaleLayout mx() { return {.kind = Kind::kMx, .columns = 32}; }
  static ScaleLayout nv() { return {.kind = Kind::kNv, .columns = 16}; }

  bool is_scaled() const { return kind != Kind::kNone; }
  bool operator==(const ScaleLayout&) const = default;
  /// "", "tensor", "row", "block 128x128", "mx", "nv".
  std::string to_string() const;
};

}  // namespace tessera
