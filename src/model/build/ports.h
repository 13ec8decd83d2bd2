#pragma once

#include <array>
#include <optional>
#include <span>
#include <string_view>

#include "core/id_vector.h"
#include "core/slice.h"
#include "model/config/config.h"
#include "model/config/product_precision.h"
#include "parallel/stage_groups.h"
#include "program/program.h"

namespace tessera {

/// The shape of one micro-batch, and the storage type of activations and matrix weights. The ranks
/// of TP · CP share it: each has T_l = T / (TP · CP) tokens of its own.
struct BatchShape {
  int64_t num_tokens = 0;       ///< T, all sequences together
  int64_t max_sequences = 1;    ///< bound of the packed sequences; cu_seqlens has one more entry
  int64_t sequence_length = 0;  ///< that none is longer than, for what depends on it; 0: T
  DType dtype = DType::kF32;
  ProductPrecision products = {};
  /// Where positive, layers measure the largest attention logits, exactly those above it (QkClip).
  double qk_clip = 0;
  /// Tokens' losses count by weights (Port::kTokenWeights): of a policy, or of preferences.
  bool weighted_tokens = false;
  /// Routers take choices that are given (Port::kReplayedExperts): of a rollout, say.
  bool replays_routing = false;
  /// Routers tell what they chose (Port::kChosenExperts).
  bool tells_routing = false;
  /// Routers do what they do in training alone (Port::kNoise).
  bool trains = false;
};

/// Keys and values of earlier tokens, for generation: the layer reads and extends caches of
/// `capacity` tokens of one sequence; or with `num_pages`, those of shape.max_sequences sequences
/// of at most `capacity` tokens each, in pages of kPageTokens that all layers number alike, where
/// layers without attention keep the states of `num_slots` sequences.
struct CacheShape {
  int64_t capacity = 0;
  int64_t num_pages = 0;
  int64_t num_slots = 0;

  bool is_paged() const { return num_pages > 0; }
};

/// Whether layers of latent attention cache latents, which serve all heads, instead of keys and
/// values: pages do, unless operands of products are rounded, which then differ from training's.
bool caches_latents(const ModelConfig& config, const BatchShape& shape,
                    const std::optional<CacheShape>& cache);

/// Elements that a layer caches of a token.
struct CacheWidths {
  int64_t keys = 0;
  int64_t values = 0;
};
CacheWidths cache_widths(const ModelConfig& config, const BatchShape& shape,
                         const std::optional<CacheShape>& cache);

/// T_l: a rank's own tokens of a micro-batch.
inline int64_t own_tokens(const BatchShape& shape, const StageGroups& groups) {
  return shape.num_tokens / groups.token_ranks();
}
/// T_g: those of its tensor-parallel group.
inline int64_t group_tokens(const BatchShape& shape, const StageGroups& groups) {
  return own_tokens(shape, groups) * groups.tp->size();
}

/// The query heads that a rank attends with, of those of the model.
IndexRange attended_heads(const ModelConfig& config, const StageGroups& groups);

/// The values that the model's programs are given and give beside weights: where a program is
/// bound, its values are called by these. port_rules() says of each what it is.
enum class Port : uint8_t {
  // Common to all layers, or of the model's ends.
  kHidden,
  kPositions,
  kCuSeqlens,
  kChunkBounds,
  kTemperatures,
  kTokens,
  kLabels,
  kGatheredLabels,
  kLossScale,
  kTokenWeights,
  kHiddenOut,
  kLoss,
  kTokenLoss,
  kLogits,
  kMaxLogits,
  // MoE.
  kExpertBias,
  kEarlierCounts,
  kSegments,
  kTokenOrder,
  kReplayedExperts,
  kOwnTokens,
  kTokenNumbers,
  kNoise,
  kBalanceLoss,
  kZLoss,
  kScoreMeans,
  kCounts,
  kDropped,
  kCountsSoFar,
  kChosenExperts,
  // Cache.
  kStart,
  kCacheLength,
  kKeyCache,
  kValueCache,
  kIndexCache,
  kCacheRows,
  kPageTable,
  kCacheSlots,
  kQueryConvState,
  kKeyConvState,
  kValueConvState,
  kDeltaStates,
  kScanStates,
  kCompressState,
  kIndexState,
  // Choice of tokens.
  kChosenRows,
  kTokenRules,
  kChosenToken,
  kChosenLogProbability,
  // Multi-token prediction.
  kEmbedded,
};
inline constexpr size_t kNumPorts = static_cast<size_t>(Port::kEmbedded) + 1;

/// The programs that have ports.
enum class ProgramRole : uint8_t { kEmbedding, kLayer, kHead, kLogits };

/// What a program is built for.
struct PortContext {
  ProgramRole role = ProgramRole::kLayer;
  const ModelConfig& config;
  LayerKind kind = {};  ///< of a layer
  const BatchShape& shape;
  const StageGroups& groups;
  std::optional<CacheShape> cache = std::nullopt;
  /// Rows of which a program of logits chooses the next token; 0: it gives the logits of all.
  int64_t chosen_rows = 0;
};

enum class PortUse : uint8_t {
  kInput,
  kInPlace,  ///< read and changed
  kOutput,
};

struct PortRule {
  Port port;
  std::string_view name;  ///< of the program's input
  PortUse use;
  std::string_view what;
  ValueType (*type)(const PortContext& context);
  bool (*present)(const PortContext& context);
};

/// A rule a port, in the order of the ports; outputs come in that order, too.
std::span<const PortRule> port_rules();
const PortRule& port_rule(Port port);
inline std::string_view port_name(Port port) {
  return port_rule(port).name;
}
inline ValueType port_type(Port port, const PortContext& context) {
  return port_rule(port).type(context);
}

/// Something for some of the ports.
template <typename T>
class PortTable {
 public:
  bool has(Port port) const { return entry(port).has_value(); }
  /// Throws InternalError where there is none.
  const T& at(Port port) const {
    ensure(has(port), "nothing is there for port '{}'", port_name(port));
    return *entry(port);
  }
  void set(Port port, T value) { entries_[number_of(port)] = std::move(value); }

 private:
  const std::optional<T>& entry(Port port) const { return entries_[number_of(port)]; }

  std::array<std::optional<T>, kNumPorts> entries_;
};

/// A program's values by port.
class PortMap : public PortTable<ValueId> {
 public:
  /// The port that a value is bound by. Throws InternalError where it is none's.
  Port port_of(ValueId id) const;
};

/// Memory for ports; a program takes what it has ports for.
using PortTensors = PortTable<Tensor>;

/// Adds the program's input (or what it changes in place) of a port, as the rule says, where it is
/// not there yet.
ValueId add_port(Program& program, PortMap& ports, Port port, const PortContext& context);

/// Marks the ports that are outputs as the program's. Throws InternalError where a port is there
/// that the rules do not have for this context, is missing, or has another type.
void finish_ports(Program& program, const PortMap& ports, const PortContext& context);
/// The former alone, for parts of programs.
void set_port_outputs(Program& program, const PortMap& ports);

/// Whether the balance loss of MoE layers is taken beside their routers, since it needs more than
/// they see: other ranks' counts, those of earlier forward passes, which a backward pass finds
/// changed by later ones, or which choices are kept.
bool spreads_balance(const ModelConfig& config, const StageGroups& groups);
/// Whether a layer sees chunks of its window's size.
inline bool sees_chunks(const ModelConfig& config, LayerKind kind) {
  return kind.window && config.has_chunks();
}
/// Whether attention is to keys that an indexer chooses: some sequence may have more than it would.
bool chooses_keys(const ModelConfig& config, const BatchShape& shape,
                  const std::optional<CacheShape>& cache);
/// Tokens of a sequence at most: of micro-batches, or of a cache.
int64_t longest_sequence(const BatchShape& shape, const std::optional<CacheShape>& cache);
/// Whether a layer's indexer chooses among compressed tokens: some sequence may have more entries
/// than it would.
bool chooses_entries(const ModelConfig& config, LayerKind kind, const BatchShape& shape,
                     const std::optional<CacheShape>& cache);
/// Rows of a layer's cache of keys before those of entries that tokens were compressed to, and of
/// these.
struct EntryRows {
  int64_t tokens = 0;
  int64_t entries = 0;
};
EntryRows cached_rows(const ModelConfig& config, LayerKind kind, const CacheShape& cache);
/// Whether what routers read is jittered.
inline bool jitters(const MoeConfig& moe, const BatchShape& shape) {
  return moe.num_experts > 0 && moe.router_jitter > 0 && shape.trains;
}
/// Whether choices are made by Sinkhorn's iteration.
inline bool evens_out(const MoeConfig& moe, const BatchShape& shape) {
  return moe.num_experts > 0 && moe.routing == Routing::kSinkhorn && shape.trains;
}
/// Whether experts are drawn: not where they are given, or go round-robin.
inline bool draws_experts(const MoeConfig& moe, const BatchShape& shape) {
  const bool given = moe.force_balanced || shape.replays_routing;
  return moe.num_experts > 0 && moe.draw_experts && shape.trains && !given;
}
/// Whether a layer is told of Port::kTokenNumbers.
inline bool numbers_tokens(const MoeConfig& moe, const BatchShape& shape) {
  return jitters(moe, shape) || draws_experts(moe, shape);
}
/// Whether a layer is told of Port::kNoise.
inline bool takes_noise(const MoeConfig& moe, const BatchShape& shape) {
  return numbers_tokens(moe, shape) || evens_out(moe, shape);
}
/// Whether capacities are over the tokens of several ranks.
bool shares_capacity(const MoeConfig& moe, const StageGroups& groups);

}  // namespace tessera
