#pragma once

#include "core/slice.h"
#include "ops/adamw/state_formats.h"

namespace tessera {

/// Whether state of this name is the scales of moments: "<parameter>.m_scale" or ".v_scale".
bool names_scales(std::string_view state);
/// Of moments [rows, columns] that have scales: the scales' shape.
Shape shape_of_scales(const Shape& moments);
/// The scales of the blocks of which a slice of moments has elements.
Slice slice_of_scales(const Slice& moments);
/// Whether the slice has whole blocks alone, so that who holds it needs no other to keep them.
bool has_whole_blocks(const Slice& moments);

/// Moments in a format with scales, in the host's memory: `codes` of moment_dtype [rows, columns],
/// of which the first column is number `first_column` of a whole row, and `scales` U8, of
/// slice_of_scales.
struct CodedMoments {
  Moment moment;
  MomentKind kind;
  Tensor codes;
  Tensor scales;
  int64_t first_column = 0;
};

/// The moments as F32 [rows, columns].
void decode_moments(const CodedMoments& from, const Tensor& to);
/// F32 [rows, columns] in that format, rounded to nearest. REQUIRES whole blocks.
void encode_moments(const Tensor& from, const CodedMoments& to);

}  // namespace tessera
