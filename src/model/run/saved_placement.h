#pragma once

#include <cstdint>
#include <vector>

#include "model/run/stage_programs.h"

namespace tessera {

/// Where what the programs of a chunk save of one micro-batch begins, in the buffer that all of a
/// rank's chunks and micro-batches share: offsets in bytes.
struct SavedOffsets {
  std::vector<int64_t> layers;          ///< by layer: from the forward pass on
  std::vector<int64_t> kept;            ///< by layer: from the backward pass to that of the weights
  std::vector<int64_t> heads;           ///< by depth; empty where the chunk has no loss
  std::vector<int64_t> offloaded = {};  ///< by layer: the part of `layers` that may wait elsewhere
  std::vector<int64_t> host = {};       ///< by layer: where it waits, in a buffer of the host
};

/// The part of what a layer saves that is in the host's memory for some of a step: numbers are
/// those of the step's runs (see list_step_passes).
struct LayerOffload {
  int64_t chunk = 0;  ///< of the rank
  int64_t place = 0;
  int64_t layer = 0;  ///< of the chunk
  int64_t micro_batch = 0;
  int forward = 0;   ///< behind this run, which makes it, its store begins
  int stored = 0;    ///< before this run the store is waited for: its memory is free
  int reload = 0;    ///< before this run it begins to come back, to the same address
  int backward = 0;  ///< before this run, which reads it first, it is there
};

/// Pages of a stash: the most that a step's layers have there at a time.
struct StashNeed {
  int64_t balanced = 0;  ///< where routing is balanced
  int64_t planned = 0;   ///< with StashPolicy::factor
  int64_t most = 0;      ///< whatever routing does
  StashNeed& operator+=(const StashNeed& other);
  StashNeed& operator-=(const StashNeed& other);
  /// Where `skew` times the rows of balanced routing come.
  int64_t at(double skew) const;
};
StashNeed larger(const StashNeed& a, const StashNeed& b);

/// Slabs begin at multiples of this, as memory of its own would.
inline constexpr int64_t kSlabAlignment = 256;

struct SavedPlacement {
  std::vector<std::vector<SavedOffsets>> offsets;  ///< by chunk, by place (see RunSlot)
  int64_t num_bytes = 0;
  int64_t host_bytes = 0;                   ///< of the buffer that offloaded parts wait in
  std::vector<LayerOffload> offloads = {};  ///< in the order of `forward`; others stay
  StashNeed stash = {};
};

/// Offsets of nothing yet, for every layer and head of every place.
SavedPlacement list_saved(const StagePrograms& programs);

/// Bytes of one of them.
int64_t layer_saved_bytes(const StagePrograms& programs, const PipelineChunk& chunk, int64_t layer);
int64_t layer_offloaded_bytes(const StagePrograms& programs, const PipelineChunk& chunk,
                              int64_t layer);
/// Of the offloaded part, what copies bring away where routing is balanced.
int64_t layer_moved_bytes(const StagePrograms& programs, const PipelineChunk& chunk, int64_t layer);
int64_t layer_kept_bytes(const StagePrograms& programs, const PipelineChunk& chunk, int64_t layer);
/// Of one layer and micro-batch.
StashNeed layer_stash(const StagePrograms& programs, const PipelineChunk& chunk, int64_t layer);
int64_t head_saved_bytes(const StagePrograms& programs, int64_t depth);

/// One behind the other: right for any order of passes. Nothing is offloaded.
SavedPlacement place_in_line(const StagePrograms& programs);

}  // namespace tessera
