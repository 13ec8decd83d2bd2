#pragma once

#include "model/batch/batch_inputs.h"
#include "model/batch/model_balance.h"
#include "model/batch/pass_statistics.h"
#include "model/run/bound_program.h"
#include "model/run/chunk_streams.h"
#include "model/run/layer_copies.h"
#include "model/run/rounding_tables.h"
#include "model/run/saved_placement.h"
#include "model/run/stash_pool.h"
#include "runtime/elastic_slabs.h"

namespace tessera {

/// What of the saved values waits in the host's memory, and the lanes that bring it there and back;
/// null where none does.
struct HostCopies {
  Buffer memory;
  std::unique_ptr<CopyLane> stores, reloads;
};

/// The memory of one micro-batch in a chunk.
struct ChunkMemory {
  ChunkStreams streams;
  BatchInputs inputs;
  PassStatistics statistics;
  ModelBalance balance;
  Buffer hidden;  ///< the streams, one behind the other
  Shape hidden_shape;
  DType dtype;
  std::byte* saved;  ///< what is saved begins there, at these offsets
  SavedOffsets saved_offsets;

  ChunkMemory(const StagePrograms& programs, const PipelineChunk& chunk, const ElasticSlabs& slabs,
              SavedOffsets offsets);

  Tensor stream(int64_t idx) const;
  std::byte* saved_at(const std::vector<int64_t>& offsets, int64_t idx) const {
    return saved + offsets.at(idx);
  }
  /// The hidden states that leave the chunk, by depth (see ChunkStreams), and their gradients.
  Tensor hidden_out(int64_t depth) const { return stream(streams.hidden_at_depth(depth)); }
  Tensor grad_out(int64_t depth) const { return stream(streams.grad_from_outside(depth)); }
};

/// What the runs of a rank's chunks share.
struct ChunkState {
  ParameterSet& parameters;
  LayerCopies& weight_copies;
  RoundingTables& roundings;
  std::vector<ExpertState>& experts;
  ElasticSlabs& slabs;
  const HostCopies& copies;
  StashPool* stash = nullptr;  ///< where layers stash rows
  /// Gives the parameters their addresses for each run of a program; without one they are those of
  /// `parameters` for good.
  WeightStore* store = nullptr;
};

/// Joins the programs of a chunk with that memory and with what all runs of a rank share, since it
/// runs one pass at a time; all of which must outlive the result.
BoundChunk bind_chunk(const StagePrograms& programs, const PipelineChunk& chunk,
                      const ChunkMemory& memory, const ChunkState& state);

}  // namespace tessera
