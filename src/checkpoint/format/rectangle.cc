#include "checkpoint/format/rectangle.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"

namespace tessera {
namespace {

using Index = std::array<int64_t, Shape::kMaxRank>;

/// The element number, within the dense elements of `rectangle`, of a global index.
int64_t position(const Rectangle& rectangle, const Index& index) {
  int64_t linear = 0;
  for (int dim = 0; dim < rectangle.shape.rank(); ++dim) {
    linear = linear * rectangle.shape[dim] + index[dim] - rectangle.offset[dim];
  }
  return linear;
}

/// The first of the trailing dims that `part` shares whole with both: from the dim before it on, a
/// run of elements lies in one piece in both.
int first_of_run(const Rectangle& part, const Rectangle& from, const Rectangle& to) {
  int dim = part.shape.rank() - 1;
  while (dim > 0 && part.shape[dim] == from.shape[dim] && part.shape[dim] == to.shape[dim]) --dim;
  return std::max(dim, 0);
}

template <typename From, typename To>
void convert_run(const std::byte* from, std::byte* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From element;
    std::memcpy(&element, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    const To converted(static_cast<float>(element));
    std::memcpy(to + i * static_cast<int64_t>(sizeof(To)), &converted, sizeof(To));
  }
}

void copy_run(const std::byte* from, DType from_type, std::byte* to, DType to_type, int64_t count) {
  if (from_type == to_type) {
    std::memcpy(to, from, count * dtype_size(to_type));
  } else if (from_type == DType::kF32) {
    convert_run<float, Bf16>(from, to, count);
  } else {
    convert_run<Bf16, float>(from, to, count);
  }
}

/// Moves `index` to the next run of `part`; false after the last one.
bool advance(Index& index, const Rectangle& part, int num_dims) {
  for (int dim = num_dims - 1; dim >= 0; --dim) {
    int64_t& i = index[dim];
    if (++i < part.offset[dim] + part.shape[dim]) return true;
    i = part.offset[dim];
  }
  return false;
}

}  // namespace

Rectangle whole(const Shape& shape) {
  Rectangle rectangle{shape, shape};
  for (int dim = 0; dim < shape.rank(); ++dim) rectangle.offset[dim] = 0;
  return rectangle;
}

std::optional<Rectangle> intersect(const Rectangle& a, const Rectangle& b) {
  ensure(a.shape.rank() == b.shape.rank(), "intersecting rank {} with rank {}", a.shape.rank(),
         b.shape.rank());
  Rectangle both = a;
  for (int dim = 0; dim < a.shape.rank(); ++dim) {
    const int64_t begin = std::max(a.offset[dim], b.offset[dim]);
    const int64_t end = std::min(a.offset[dim] + a.shape[dim], b.offset[dim] + b.shape[dim]);
    if (begin >= end) return std::nullopt;
    both.offset[dim] = begin;
    both.shape[dim] = end - begin;
  }
  return both;
}

bool contains(const Rectangle& outer, const Rectangle& inner) {
  if (outer.shape.rank() != inner.shape.rank() || inner.offset.rank() != inner.shape.rank()) {
    return false;
  }
  for (int dim = 0; dim < outer.shape.rank(); ++dim) {
    // Differences instead of sums, which hostile offsets could overflow.
    const int64_t before = inner.offset[dim] - outer.offset[dim];
    if (before < 0 || inner.shape[dim] > outer.shape[dim]) return false;
    if (before > outer.shape[dim] - inner.shape[dim]) return false;
  }
  return true;
}

bool can_copy(DType from, DType to) {
  return from == to || (is_storage(from) && is_storage(to));
}

void copy_rectangle(const Rectangle& part, const RectangleElements& from,
                    const RectangleElements& to) {
  ensure(contains(from.rectangle, part) && contains(to.rectangle, part) &&
             can_copy(from.dtype, to.dtype),
         "copy_rectangle: the part leaves its tensors, or the types do not fit");
  if (part.shape.num_elements() == 0) return;
  const int rank = part.shape.rank();
  const int run_dim = first_of_run(part, from.rectangle, to.rectangle);
  int64_t run = 1;
  for (int dim = run_dim; dim < rank; ++dim) run *= part.shape[dim];
  Index index{};
  std::ranges::copy(part.offset.dims(), index.begin());
  do {
    copy_run(from.data + position(from.rectangle, index) * dtype_size(from.dtype), from.dtype,
             to.data + position(to.rectangle, index) * dtype_size(to.dtype), to.dtype, run);
  } while (advance(index, part, run_dim));
}

}  // namespace tessera
