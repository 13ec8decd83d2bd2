#pragma once

#include <cstdint>
#include <vector>

#include "model/run/stage_programs.h"

namespace tessera {

/// Where what the programs of a chunk save of one micro-batch begins, in the buffer that all of a
/// rank's chunks and micro-batches share: offsets in bytes.
struct SavedOffsets {
  std::vector<int64_t> layers;  ///< by layer: from the forward pass on
  std::vector<int64_t> kept;    ///< by layer: from the backward pass to that of the weights
  std::vector<int64_t> heads;   ///< by depth; empty where the chunk has no loss
};

/// Slabs begin at multiples of this, as memory of its own would.
inline constexpr int64_t kSlabAlignment = 256;

struct SavedPlacement {
  std::vector<std::vector<SavedOffsets>> offsets;  ///< by chunk, by place (see RunSlot)
  int64_t num_bytes = 0;
};

/// Offsets of nothing yet, for every layer and head of every place.
SavedPlacement list_saved(const StagePrograms& programs);

/// Bytes of one of them.
int64_t layer_saved_bytes(const StagePrograms& programs, const PipelineChunk& chunk, int64_t layer);
int64_t layer_kept_bytes(const StagePrograms& programs, const PipelineChunk& chunk, int64_t layer);
int64_t head_saved_bytes(const StagePrograms& programs, int64_t depth);

/// One behind the other: right for any order of passes.
SavedPlacement place_in_line(const StagePrograms& programs);

}  // namespace tessera
