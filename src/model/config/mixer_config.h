#pragma once

#include <cstdint>
#include <vector>

/// What layers mix tokens by: kinds and sizes of attention, delta rules, Mamba-2 and convolutions.
namespace tessera {

/// How queries, keys and values are made from the hidden state.
enum class AttentionKind {
  kStandard,  ///< one projection each; grouped queries where there are fewer KV heads
  kLatent,    ///< through low-rank latents: multi-latent attention (DeepSeek-V2, section 2.1)
  /// One head of keys, which are the values too, of a window and of what earlier tokens were
  /// compressed to (DeepSeek-V4: DeepSeek-AI, 2026, section 2.3), as CompressedConfig says.
  kCompressed,
};

/// What a layer with compressed attention sees beside its window.
enum class Compression {
  kNone,    ///< nothing
  kSparse,  ///< entries of a few tokens each, of which an indexer chooses (CSA, section 2.3.1)
  kHeavy,   ///< all entries of many tokens each (HCA, section 2.3.2)
};

/// What attention's output is multiplied by (ModelConfig::attention_gate), of a projection of the
/// hidden state.
enum class AttentionGate {
  kSigmoid,          ///< element by element (Qwen3-Next)
  kSoftplus,         ///< element by element
  kSoftplusOfHeads,  ///< a number for each head (Laguna)
};

/// RMSNorm of queries and keys, before the rotation or after it.
enum class QkNorm {
  kNone,
  kHead,  ///< each head by itself, one weight of the head's size for all (Qwen3)
  kAll,   ///< all heads as one row (OLMoE)
  kL2,    ///< each head by itself, without a weight, in layers with a rotation (Llama 4)
};

/// Which tokens a layer with a window sees.
enum class WindowKind {
  kSliding,  ///< the last so many
  kChunked,  ///< of the sequence's chunks of so many tokens the own one's, up to itself (Llama 4)
};

/// Sizes of multi-latent attention. A query or key head is `nope_size` elements without a position
/// followed by `rope_size` rotated ones; the rotated part of a key is one for all heads. With
/// RopeConfig::fraction 0 that part is not rotated either.
struct LatentConfig {
  int64_t query_rank = 0;  ///< 0: queries are not compressed
  int64_t kv_rank = 512;
  int64_t nope_size = 128;
  int64_t rope_size = 64;
  int64_t value_size = 128;
  double norm_eps = 1e-6;  ///< of the latents' norms, which Hugging Face keeps apart from norm_eps
};

/// Sizes of compressed attention. Queries come through `query_rank` elements and are normed head by
/// head; keys, which are the values, are one head. The last `rope_size` elements of heads are
/// rotated, those of what attention gives turned back. Groups of heads are projected to
/// `output_rank` elements each, these together to the hidden size. In `sparse_layers` an entry is
/// made of sparse_rate tokens and as many before them, in `heavy_layers` of heavy_rate tokens.
struct CompressedConfig {
  int64_t query_rank = 64;
  int64_t rope_size = 16;
  int64_t output_groups = 1;
  int64_t output_rank = 64;
  int64_t sparse_rate = 4;
  int64_t heavy_rate = 128;
  std::vector<int64_t> sparse_layers;
  std::vector<int64_t> heavy_layers;

  bool has_entries() const { return !sparse_layers.empty() || !heavy_layers.empty(); }
  /// Tokens that an entry of such a layer is made of, those of the window before it left out.
  int64_t rate(Compression compression) const {
    return compression == Compression::kSparse ? sparse_rate : heavy_rate;
  }
  bool operator==(const CompressedConfig&) const = default;
};

/// The indexer of DeepSeek Sparse Attention (ops/index_topk): latent attention sees of a token's
/// past the `top_k` keys with the largest scores, of queries from the query latent and keys of the
/// hidden state; compressed attention so many entries, of keys that are compressed likewise. Its
/// weights are loaded and never trained.
struct IndexConfig {
  int64_t top_k = 0;  ///< 0: there is none, and tokens see all
  int64_t num_heads = 64;
  int64_t head_size = 128;   ///< the first latent.rope_size (last compressed.rope_size) are rotated
  bool interleaved = false;  ///< rotary pairs of its heads are neighbours (latent attention)

  bool is_on() const { return top_k > 0; }
  bool operator==(const IndexConfig&) const = default;
};

/// What layers of `delta_layers` have.
enum class DeltaKind {
  kGated,  ///< Gated DeltaNet: Gated Delta Networks, Yang et al., 2024
  /// Kimi Delta Attention (Kimi Linear: Kimi Team, 2025): a decay for each element of a key, which
  /// a projection through key_size elements makes; an output gate by the sigmoid, through
  /// value_size
  kKimi,
};

/// Sizes of the layers whose mixer is a gated delta rule.
struct DeltaConfig {
  DeltaKind kind = DeltaKind::kGated;
  int64_t num_key_heads = 4;
  int64_t num_value_heads = 4;  ///< a multiple of the key heads, each of which serves as many
  int64_t key_size = 64;
  int64_t value_size = 64;
  int64_t conv_size = 4;  ///< tokens of the short convolution

  int64_t keys() const { return num_key_heads * key_size; }
  int64_t values() const { return num_value_heads * value_size; }
  bool is_kimi() const { return kind == DeltaKind::kKimi; }
};

/// Sizes of the layers whose mixer is Mamba-2 (Transformers are SSMs: Dao and Gu, 2024, section 7).
struct MambaConfig {
  int64_t num_heads = 8;
  int64_t head_size = 64;
  int64_t num_groups = 1;   ///< of heads, which divide them, with B and C in common
  int64_t state_size = 64;  ///< of each element of a head
  int64_t conv_size = 4;    ///< tokens of the short convolution
  bool conv_bias = true;
  bool proj_bias = false;  ///< of the projections into the mixer and out of it
  double min_step = 0;     ///< steps are raised to it after the softplus
  double max_step = 0;     ///< and lowered to this; 0: without limit

  int64_t inner() const { return num_heads * head_size; }
  /// Width of B, and of C.
  int64_t states() const { return num_groups * state_size; }
};

/// Sizes of the layers whose mixer is a gated short convolution of the hidden size (LFM2 Technical
/// Report: Liquid AI, 2025, section 2): C · conv(B · x), of three projections B, C and x.
struct ConvConfig {
  int64_t size = 3;   ///< tokens
  bool bias = false;  ///< of the convolution and of the projections into the mixer and out of it
};

}  // namespace tessera
