#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/config.h"
#include "program/program.h"

namespace tessera {

/// The shape of one micro-batch, and the storage type of activations and matrix weights.
struct BatchShape {
  int64_t num_tokens = 0;       ///< T, all sequences together
  int64_t max_sequences = 1;    ///< bound of the packed sequences; cu_seqlens has one more entry
  int64_t sequence_length = 0;  ///< typical length, for the cost of attention; 0: T
  DType dtype = DType::kF32;
};

/// Keys and values of earlier tokens, for generation: the layer reads and extends caches of
/// `capacity` tokens.
struct CacheShape {
  int64_t capacity = 0;
};

/// One decoder layer as a program, and where its bound values are (-1: this layer has none).
/// Inputs: hidden A [T,H], positions I32 [T], cu_seqlens I32 [max_sequences+1] (training) or start
/// I32 [1] and cache_length I32 [1] (generation), expert_bias F32 [E], prior_counts F32 [E].
/// Outputs: hidden A [T,H]; of an MoE layer also balance_loss F32 [1], z_loss F32 [1], counts F32
/// [E], dropped I64 [1], score_means F32 [E] (see Router).
struct LayerProgram {
  Program forward;
  ValueId hidden = -1;
  ValueId positions = -1;
  ValueId cu_seqlens = -1;
  ValueId start = -1;
  ValueId cache_length = -1;
  ValueId key_cache = -1;
  ValueId value_cache = -1;
  ValueId expert_bias = -1;
  ValueId prior_counts = -1;

  ValueId hidden_out = -1;
  ValueId balance_loss = -1;
  ValueId z_loss = -1;
  ValueId score_means = -1;
  ValueId counts = -1;
  ValueId dropped = -1;
};

/// "moe_layer", "dense_layer", "window_moe_layer" or "window_dense_layer".
std::string layer_kind_name(LayerKind kind);

/// Builds the program of the layers of one kind. With a cache the layer generates: it is not meant
/// to be differentiated.
LayerProgram build_layer(const ModelConfig& config, LayerKind kind, const BatchShape& shape,
                         const std::optional<CacheShape>& cache = std::nullopt);

/// Token ids I32 [T] and the table A [V,H] → hidden A [T,H].
struct EmbeddingProgram {
  Program forward;
  ValueId tokens = -1;
  ValueId hidden_out = -1;
};
EmbeddingProgram build_embedding(const ModelConfig& config, const BatchShape& shape);

/// Final norm, head and cross-entropy. Inputs: hidden A [T,H], labels I32 [T] (-100: no loss),
/// scale F32 [1]. Outputs: loss F32 [1] (scale times the sum over valid tokens) and token_loss F32
/// [T]. `with_gradient` uses the fused operator, which computes its gradients in the forward pass;
/// the gradient of the loss that its backward program is given must then be 1.
struct HeadProgram {
  Program forward;
  ValueId hidden = -1;
  ValueId labels = -1;
  ValueId scale = -1;
  ValueId loss = -1;
  ValueId token_loss = -1;
};
HeadProgram build_head(const ModelConfig& config, const BatchShape& shape, bool with_gradient);

/// Final norm and head for generation: hidden A [T,H] → logits [T,V] in the storage type.
struct LogitsProgram {
  Program forward;
  ValueId hidden = -1;
  ValueId logits = -1;
};
LogitsProgram build_logits(const ModelConfig& config, const BatchShape& shape);

}  // namespace tessera
