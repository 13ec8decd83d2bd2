#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>

#include "model/config/config.h"

namespace tessera {

// Model families of Hugging Face's transformers. A family is a description: the keys of its
// config.json with the defaults of its configuration class, a few rules, and the names of its
// weights where they differ from most families'.

/// Which layers have a sliding window.
enum class WindowRule {
  kNone,
  kSize,         ///< all, where `sliding_window` is not null
  kSwitched,     ///< all, where `use_sliding_window` is true
  kLaterLayers,  ///< by `layer_types`; without it, switched layers from `max_window_layers` on
  kEvenLayers,   ///< by `layer_types`; without it, switched even layers below `max_window_layers`
  kAlternating,  ///< by `layer_types`; without it, even layers
  kLastLayers,   ///< by `layer_types`; without it, layers from `max_window_layers` on
  kListed,       ///< by `layer_types`; without it, none
  kFiveOfSix,    ///< by `layer_types`; without it, all but the first and every sixth
  /// By `layer_types`; without it, all but every sixth; never the last layer, whatever they say.
  kGemma,
  kThreeOfFour,  ///< by `layer_types`; without it, all but the first and every fourth from there on
  kAllButEvery,  ///< by `layer_types`; without it, all but every `sliding_window_pattern`-th
  /// Llama 4: chunks, in the layers that `no_rope_layers` says are rotated; without it, all but
  /// every `no_rope_layer_interval`-th
  kChunksOfRotated,
};

/// How layers with a sliding window and those without are rotated.
enum class RopeRule {
  kAlike,
  kWindowsAlone,   ///< EXAONE: where there is a `sliding_window`, layers without it are not
  kChunksAlone,    ///< Llama 4: layers with chunks are, the others are not
  kByLayerType,    ///< by an entry of `rope_parameters` for each type of layer
  kByCompression,  ///< DeepSeek-V4: "main", and "compress" of layers with compressed tokens
  kByLayer,        ///< Granite: by a base for each layer, 0 for none, which its window decides
  kWindowsOnly,    ///< AFMoE: layers with a window are, which `sliding_window` sizes; others never
  kNever,          ///< no layer is; what a file says of it has no effect in transformers
};

/// How the router's logits become choices and probabilities.
enum class RouterRule {
  kSoftmax,        ///< the best of a softmax, normalized if `norm_topk_prob`
  kGroupMax,       ///< DeepSeek-V2: by `topk_method`, never normalized
  kBiasedSigmoid,  ///< DeepSeek-V3: sigmoid, correction bias, groups by their two best
  kBiasedSoftmax,  ///< ERNIE 4.5: a softmax's with a correction bias, always normalized
  /// DeepSeek-V4: by `scoring_func`, with a correction bias where no table chooses, normalized
  kBiasedScores,
  kInputSigmoid,  ///< Llama 4: a sigmoid of the chosen logits, a factor of what experts read
};

/// How the tensors of experts lie.
enum class ExpertTensors {
  kPlain,  ///< one by one, or all of a layer in one [E, outputs, inputs], gates before the others
  /// gpt-oss: all of a layer in one [E, inputs, outputs], gates and the others in turn; with
  /// biases, as the router has one
  kAlternating,
  /// Granite: all of a layer in "input_linear" [E, gates and others, inputs] and "output_linear";
  /// so is the shared expert, which stands beside the MoE layer
  kLinears,
  /// Granite with windows: all of a layer in "experts.gate_up_proj" and "experts.down_proj" [E,
  /// outputs, inputs], the shared expert as above
  kFused,
  kInputsFirst,  ///< Llama 4: all of a layer in one [E, inputs, outputs], gates before the others
  /// Gemma 4: all of a layer in one [E, outputs, inputs], beside router, MLP and attention
  kBesideMlp,
};

/// How a configuration says which layers have Mamba-2, and its sizes.
enum class MambaRule {
  kNone,
  kGranite,  ///< by `layer_types`; a rotation only where `position_embedding_type` is "rope"
  /// By `layers_block_type` or `hybrid_override_pattern`, in which a layer is a mixer, an MLP or
  /// experts; no rotation. Weights have names of their own (tensor_map.cc).
  kNemotron,
};

/// What published files call layers of multi-token prediction, which, where nothing else is said,
/// read states behind the final norm (ModelConfig::mtp_normed), one projection being of embedding
/// and state side by side.
enum class PredictionNames {
  kNone,  ///< nothing that is taken in
  /// DeepSeek-V3's: layers behind the last one, which also repeat embedding and head
  kBehindLayers,
  kApart,  ///< Qwen3-Next's: "mtp.", with one layer
  /// DeepSeek-V4's: "mtp.N.", which read the streams before the head, and have two projections and
  /// weights of the head's streams of their own
  kStreams,
};

struct Family {
  std::string_view model_type;
  std::string_view architecture;
  /// What published files have in its place; empty: no other.
  std::string_view other_architecture;
  /// A model type, and its architecture, whose files hold this model beside encoders of images: its
  /// configuration is their `text_config`, names of its tensors begin with `whole_prefix`, where
  /// this model's begin with `whole_part`.
  std::array<std::string_view, 2> whole = {};
  std::string_view whole_prefix = "model.language_model.";
  std::string_view whole_part = "model.";
  /// What names of its encoders' tensors begin with; empty: no more.
  std::array<std::string_view, 4> encoders = {"model.visual."};
  /// A JSON object of the keys that the family reads, with transformers' defaults.
  std::string_view defaults;
  /// A JSON object of keys that may only have these values, or one of those in {"any": [...]}.
  std::string_view fixed = "{}";
  /// A JSON list of keys that files of the family have and that change nothing in transformers.
  std::string_view unused = "[]";
  /// A JSON object from names that only this family has to those by which it is read.
  std::string_view renamed = "{}";
  AttentionKind attention = AttentionKind::kStandard;
  bool interleaved = false;          ///< rotary pairs are neighbours
  bool interleaved_indexer = false;  ///< and those of an indexer, where `index_topk` says of one
  QkNorm qk_norm = QkNorm::kNone;
  bool norm_after_rotation = false;
  bool qkv_bias = false;     ///< biases in any case, not by `attention_bias` or `qkv_bias`
  bool output_bias = false;  ///< `attention_bias` is also of the output projection
  bool attention_sinks = false;
  /// MiMo-V2: layers with a window have sinks, and twice the key and value heads
  bool mimo_windows = false;
  bool clamped_swiglu = false;  ///< instead of what `hidden_act` says
  bool listed_counts = false;   ///< numbers of experts may be lists of one number for each layer
  bool base_alpha = false;      ///< the rotation's base may grow by an `alpha` (rope_json.cc)
  /// Qwen3-Next: Gated DeltaNet in the layers that `layer_types` lists, or in all but every n-th;
  /// attention with an output gate; norms of 1 + weight
  bool gated_delta = false;
  /// Qwen3.5: whose projections are tensors of their own, not by key head
  bool apart_delta = false;
  /// Kimi Linear: Kimi Delta Attention in layers of a list (kimi_json.h)
  bool kimi_delta = false;
  /// LFM2: gated short convolutions in the layers that `layer_types` lists
  bool gated_conv = false;
  /// Gemma 4: norms behind attention and MLP, and around the MLP and the experts beside it; layers
  /// without a window have heads of other sizes and perhaps no value projection (gemma_json.h)
  bool gemma = false;
  /// DeepSeek-V4: compressed attention, residual streams, tables of token ids (v4_json.h)
  bool deepseek_v4 = false;
  /// Phi-3.5-MoE: LayerNorms, a bias of the head, SparseMixer, rotations by longrope (phi_json.h)
  bool phimoe = false;
  bool plain_mlps = false;  ///< MLPs and experts have no gates
  bool one_shared = false;  ///< a shared expert of the experts' inner size, which no key says
  MambaRule mamba = MambaRule::kNone;
  WindowRule window = WindowRule::kNone;
  RopeRule rope = RopeRule::kAlike;
  int64_t first_dense = 1;  ///< layers without experts, where no list of MLPs' types says which
  RouterRule router = RouterRule::kSoftmax;
  ExpertTensors expert_tensors = ExpertTensors::kPlain;
  std::string_view moe_name = "mlp";
  std::string_view router_name = "gate";
  std::string_view correction_name = "gate.e_score_correction_bias";
  std::array<std::string_view, 3> expert_names = {"gate_proj", "up_proj", "down_proj"};
  /// Of dense MLPs and shared experts, where experts have other names; else empty.
  std::array<std::string_view, 3> mlp_names = {};
  std::string_view shared_name = "shared_experts";
  std::array<std::string_view, 2> norm_names = {"q_norm", "k_norm"};
  std::string_view output_name = "o_proj";
  std::string_view sinks_name = "sinks";
  /// Of attention's gate, a sigmoid of each element or what `gating` says.
  std::string_view gate_name;
  std::string_view dense_name = "mlp";
  std::array<std::string_view, 2> layer_norms = {"input_layernorm", "post_attention_layernorm"};
  /// Of what attention and MLP give, where these are normed; else empty.
  std::array<std::string_view, 2> out_norms = {};
  std::string_view final_norm = "model.norm";
  std::string_view head_name = "lm_head";
  PredictionNames predictions = PredictionNames::kNone;

  /// Whether the family reads what is named so, under whatever name its files have for it.
  bool has_key(std::string_view key) const;
  bool has_correction_bias() const {
    return router == RouterRule::kBiasedSigmoid || router == RouterRule::kBiasedSoftmax ||
           router == RouterRule::kBiasedScores;
  }
  bool is_moe() const { return has_key("num_experts_per_tok"); }
};

/// Every supported family, those that express the plainest models first.
std::span<const Family> families();
/// Throws UserError with the known names where there is none.
const Family& find_family(std::string_view model_type);
/// The one whose `whole` is this model type; null where there is none.
const Family* find_text_family(std::string_view whole_type);

}  // namespace tessera
