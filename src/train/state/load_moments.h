#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "ops/adamw/moment_blocks.h"

namespace tessera {

/// How a checkpoint keeps the moments whose names end so (".m" or ".v").
MomentKind find_moment(const CheckpointReader& reader, std::string_view suffix);

/// Adds the tensors that a moment is kept in.
void append_moment(const std::string& name, const Shape& shape, MomentKind kind,
                   std::vector<GlobalTensor>& all);

/// A moment that a checkpoint keeps otherwise than an optimizer that goes on from it.
struct MomentSlice {
  Moment moment = Moment::kFirst;
  MomentKind found = MomentKind::kF32;
  MomentKind own = MomentKind::kF32;
  NamedSlice kept;
  Tensor scales;  ///< where `own` has some
};

/// Takes those out of an optimizer's state where one of the formats has scales; others are
/// converted as they are read.
std::vector<MomentSlice> take_converted(const StateFormats& found, const StateFormats& own,
                                        std::vector<NamedSlice>& state);

/// Reads it, widened or rounded to nearest.
void convert_moment(const CheckpointReader& reader, const MomentSlice& moment);

}  // namespace tessera
