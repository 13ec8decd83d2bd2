#pragma once

#include <string>

#include "model/build/layer_builder.h"

namespace tessera {

/// What a part of a layer reads of the hidden states, and how what it gives joins them.
struct ResidualRead {
  ValueId x = -1;     ///< A [T_l, H]
  ValueId post = -1;  ///< of residual streams, with comb (ops/stream_weights)
  ValueId comb = -1;
};

/// The hidden states as the part `part` ("attn" or "mlp") reads them: themselves, or what it has of
/// several streams.
ResidualRead read_residual(LayerBuilder& builder, ValueId state, const std::string& part);

/// The hidden states behind a part: their sum with what it gives, or streams that it has joined.
ValueId join_residual(LayerBuilder& builder, ValueId state, const ResidualRead& read, ValueId given,
                      const std::string& name);

/// Streams that each begin as the embedding's rows.
ValueId spread_embedding(const ModelConfig& config, Program& program, ValueId rows);

/// What names of the weights begin with by which the head of a depth (build_head) reads residual
/// streams.
std::string head_streams_name(int64_t depth);

/// The hidden states that the head of a depth reads, A [T_l, H]. Each depth's has
/// weights of its own.
ValueId collapse_for_head(const ModelConfig& config, const StageGroups& groups, ModelProgram& head,
                          ValueId state, int64_t depth = 0);

/// What a layer of multi-token prediction works on where there are streams: of each W_h ·
/// RMSNorm(stream) + W_e · RMSNorm(embedding), as DeepSeek-V4's published code has it (`MTPBlock`).
/// `embedding` is spread over streams.
ValueId join_embedding_to_streams(LayerBuilder& builder, ValueId state, ValueId embedding);

}  // namespace tessera
