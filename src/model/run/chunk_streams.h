#pragma once

#include <algorithm>
#include <cstdint>

#include "model/run/stage_programs.h"

namespace tessera {

/// Which tensors [T_l, H] a chunk keeps for a micro-batch, one behind the other: the hidden states
/// before and after its layers, the embeddings that layers of multi-token prediction read, and the
/// gradients of both. A chunk behind the last decoder layer is given, and one with multi-token
/// prediction leaves, several hidden states: the decoder's and those of each such layer so far,
/// which here are called depths 0, 1, ...
struct ChunkStreams {
  int64_t before = 0;   ///< layers of multi-token prediction in earlier chunks
  int64_t decoder = 0;  ///< decoder layers here
  int64_t mtp = 0;      ///< layers of multi-token prediction here
  bool split = false;   ///< a later pass still reads all gradients

  ChunkStreams(const StagePrograms& programs, const PipelineChunk& chunk)
      : before(std::max<int64_t>(chunk.first_layer - programs.config.num_layers, 0)),
        decoder(chunk.num_layers),
        mtp(chunk.num_mtp),
        split(programs.part.split_weights) {}

  /// Hidden states that enter and that leave.
  int64_t num_in() const { return 1 + before; }
  int64_t num_out() const { return 1 + before + mtp; }

  /// The hidden states after layer idx - 1 of the chunk; the first num_in() enter.
  int64_t hidden(int64_t idx) const { return idx; }
  int64_t hidden_at_depth(int64_t depth) const { return hidden(decoder + depth); }
  /// The whole gradient of hidden(idx). Those of decoder layers take turns.
  int64_t grad(int64_t idx) const {
    const int64_t first = num_hidden();
    if (idx > decoder) return first + num_decoder_grads() + idx - decoder - 1;
    return first + (split ? idx : idx % 2);
  }
  /// The gradient that a depth's hidden states have from outside of the chunk's layers: of the head
  /// or the next chunk. Where a layer of multi-token prediction adds its own, not the whole one.
  int64_t grad_from_outside(int64_t depth) const {
    const bool adds = depth >= before && depth < before + mtp;
    return adds ? num_hidden() + num_grads() + depth - before : grad(decoder + depth);
  }
  /// The embeddings that the chunk's `idx`-th layer of multi-token prediction reads, and their
  /// gradient.
  int64_t embedded(int64_t idx) const { return num_hidden() + num_grads() + mtp + idx; }
  int64_t grad_embedded(int64_t idx) const { return embedded(mtp) + (split ? idx : 0); }
  int64_t count() const { return embedded(mtp) + (split ? mtp : std::min<int64_t>(mtp, 1)); }

 private:
  int64_t num_hidden() const { return 1 + before + decoder + mtp; }
  int64_t num_decoder_grads() const {
    return split ? decoder + 1 : std::min<int64_t>(decoder + 1, 2);
  }
  int64_t num_grads() const { return num_decoder_grads() + before + mtp; }
};

}  // namespace tessera
