#pragma once

#include <cstddef>
#include <optional>

#include "core/dtype.h"
#include "core/tensor.h"

namespace tessera {

/// A box of elements within a global tensor: its first index and its extents, of equal rank.
struct Rectangle {
  Shape offset;
  Shape shape;

  bool operator==(const Rectangle& other) const = default;
};

/// The box at the origin: a whole tensor.
Rectangle whole(const Shape& shape);

/// The elements in both, or nothing. Ranks must be equal.
std::optional<Rectangle> intersect(const Rectangle& a, const Rectangle& b);

/// True when `inner` lies within `outer`; also for an empty `inner`.
bool contains(const Rectangle& outer, const Rectangle& inner);

/// The dense row-major elements of a rectangle, perhaps unaligned.
struct RectangleElements {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  Rectangle rectangle;
};

/// Copies the elements of `part`, which lies within both. Types are equal, or f32 and bf16 in
/// either order.
void copy_rectangle(const Rectangle& part, const RectangleElements& from,
                    const RectangleElements& to);

/// True for the pairs of types that copy_rectangle takes.
bool can_copy(DType from, DType to);

}  // namespace tessera
