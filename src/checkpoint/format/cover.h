#pragma once

#include <optional>
#include <span>
#include <string>

#include "checkpoint/format/manifest.h"

namespace tessera {

/// Why pieces, each within a tensor of shape `global`, do not cover it exactly once, as the end of
/// a sentence about the tensor; "" where they do.
std::string cover_defect(const Shape& global, std::span<const TensorPiece> pieces);

/// The index of the first element, in row-major order, that is in no piece; nothing where all are
/// in one.
std::optional<Shape> find_hole(const Shape& global, std::span<const TensorPiece> pieces);

}  // namespace tessera
