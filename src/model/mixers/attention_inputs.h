#pragma once

#include "model/build/layer_builder.h"
#include "ops/latent_cache/latent_cache.h"
#include "ops/rope/rope.h"

namespace tessera {

/// What an indexer's scores are made of: q A [T, H·D], rotated; weights A [T, H]; k A [T, D],
/// rotated.
struct IndexValues {
  ValueId q = -1;
  ValueId weights = -1;
  ValueId k = -1;
  bool choose() const { return q.is_set(); }
};

/// What attention works on: q A [T, N·D], k A [T, Nkv·D], v A [T, Nkv·Dv], rotated; and a gate.
struct QueryKeyValue {
  ValueId q = -1;
  ValueId k = -1;
  ValueId v = -1;
  ValueId gate = -1;       ///< logits [T, N·Dv] of what attention's output is multiplied by
  IndexValues index = {};  ///< where not all keys are seen
  ValueId chosen = -1;     ///< rows of k and v that tokens see, where that is already chosen
  ValueId up = -1;         ///< the weight that makes values of latents, where k and v are latents
};

/// How the heads and tokens of attention are shared.
struct AttentionShare {
  bool by_heads = false;  ///< each rank of the tensor-parallel group holds some heads' weights
  int64_t num_heads = 1;  ///< of which this rank makes queries
  int64_t num_kv_heads = 1;
  int64_t kv_parts = 1;   ///< different shares of the key-value heads within the group
  int64_t kv_part = 0;    ///< this rank's
  int64_t kv_copies = 1;  ///< neighbours in the group that hold the same
};

AttentionShare attention_share(const LayerBuilder& builder);

/// The part of a query, key or value projection [heads · size, width] that this rank makes.
Slice head_rows(const Shape& global, bool is_query, const AttentionShare& share,
                const LayerBuilder& builder);

/// Whether keys and values are latents that all heads read.
bool caches_latents(const LayerBuilder& builder);
LatentCacheSpec latent_cache_spec(const ModelConfig& config);

/// How heads of a layer are rotated, of sequences as long as its micro-batches or caches have;
/// empty where they are not.
RotarySpec rotary_spec(const LayerBuilder& builder);

/// Queries, keys and values of any kind of attention, from the normed hidden state.
QueryKeyValue build_attention_inputs(LayerBuilder& builder, const AttentionShare& share,
                                     ValueId normed);

}  // namespace tessera
