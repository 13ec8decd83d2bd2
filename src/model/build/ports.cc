#include "model/build/ports.h"

#include <algorithm>

#include "ops/choose_token/token_rule.h"
#include "ops/noise.h"
#include "ops/paged_attention/paged_attention.h"

namespace tessera {
namespace {

using Context = PortContext;

ValueType i32(int64_t size) {
  return {.dtype = DType::kI32, .shape = {size}};
}
ValueType f32(int64_t size) {
  return {.dtype = DType::kF32, .shape = {size}};
}

ValueType hidden_type(const Context& c) {
  return {c.shape.dtype, {own_tokens(c.shape, c.groups), c.config.state_width()}};
}
ValueType own_ids(const Context& c) {
  return i32(own_tokens(c.shape, c.groups));
}
ValueType group_ids(const Context& c) {
  return i32(group_tokens(c.shape, c.groups));
}
ValueType batch_ids(const Context& c) {
  return i32(c.shape.num_tokens);
}
/// Of the tokens that attention rotates.
ValueType rotated_ids(const Context& c) {
  return c.groups.policy.replicated_attention ? own_ids(c) : group_ids(c);
}
ValueType sequence_bounds(const Context& c) {
  return i32(c.shape.max_sequences + 1);
}
/// Every sequence has at most one chunk that is not whole.
ValueType chunk_bounds_type(const Context& c) {
  const int64_t whole = c.config.has_chunks() ? c.shape.num_tokens / c.config.window : 0;
  return i32(c.shape.max_sequences + whole + 1);
}
ValueType temperatures_type(const Context& c) {
  return f32(rotated_ids(c).shape[0]);
}
ValueType own_losses(const Context& c) {
  return f32(own_tokens(c.shape, c.groups));
}
ValueType logits_type(const Context& c) {
  const int64_t rows = c.chosen_rows > 0 ? c.chosen_rows : own_tokens(c.shape, c.groups);
  return {c.shape.dtype, {rows, c.config.vocab_size}};
}
ValueType chosen_ids(const Context& c) {
  return i32(c.chosen_rows);
}
ValueType token_rules_type(const Context& c) {
  return {.dtype = DType::kU8, .shape = {c.chosen_rows, int64_t{sizeof(TokenRule)}}};
}
ValueType chosen_numbers(const Context& c) {
  return {.dtype = DType::kF64, .shape = {c.chosen_rows}};
}
ValueType by_expert(const Context& c) {
  return f32(c.config.moe.router_outputs());
}
ValueType own_choices(const Context& c) {
  return {.dtype = DType::kI32, .shape = {own_tokens(c.shape, c.groups), c.config.moe.choices()}};
}
ValueType token_numbers_type(const Context& c) {
  return {.dtype = DType::kI64, .shape = {own_tokens(c.shape, c.groups)}};
}
ValueType noise_type(const Context& /*c*/) {
  return i32(kNumNoiseWords);
}
ValueType by_head(const Context& c) {
  return f32(attended_heads(c.config.of_layer(c.kind), c.groups).count);
}
ValueType one_f32(const Context& /*c*/) {
  return f32(1);
}
ValueType one_i32(const Context& /*c*/) {
  return i32(1);
}
ValueType one_count(const Context& /*c*/) {
  return {.dtype = DType::kI64, .shape = {1}};
}
ValueType cache_type(const Context& c, int64_t width) {
  const CacheShape cache = c.cache.value_or(CacheShape{});
  const int64_t capacity = cache.is_paged() ? cache.num_pages * kPageTokens : cache.capacity;
  return {c.shape.dtype, {capacity, width}};
}
ValueType cache_lengths(const Context& c) {
  return i32(c.cache && c.cache->is_paged() ? c.shape.max_sequences : 1);
}
ValueType page_table_type(const Context& c) {
  return {.dtype = DType::kI32,
          .shape = {c.shape.max_sequences, c.cache ? pages_of(c.cache->capacity) : 0}};
}
ValueType key_cache_type(const Context& c) {
  ValueType type = cache_type(c, cache_widths(c.config.of_layer(c.kind), c.shape, c.cache).keys);
  const EntryRows rows = cached_rows(c.config, c.kind, c.cache.value_or(CacheShape{}));
  type.shape[0] = rows.tokens + rows.entries;
  return type;
}
ValueType index_cache_type(const Context& c) {
  ValueType type = cache_type(c, c.config.index.head_size);
  if (c.kind.compression != Compression::kNone)
    type.shape[0] = cached_rows(c.config, c.kind, c.cache.value_or(CacheShape{})).entries;
  return type;
}
ValueType value_cache_type(const Context& c) {
  return cache_type(c, cache_widths(c.config.of_layer(c.kind), c.shape, c.cache).values);
}

/// Sequences whose states a cache keeps.
int64_t num_states(const Context& c) {
  return c.cache && c.cache->is_paged() ? c.cache->num_slots : 1;
}
ValueType key_conv_type(const Context& c) {
  const DeltaConfig& delta = c.config.delta;
  const MambaConfig& mamba = c.config.mamba;
  return c.kind.mamba ? ValueType{c.shape.dtype, {num_states(c) * mamba.conv_size, mamba.states()}}
                      : ValueType{c.shape.dtype, {num_states(c) * delta.conv_size, delta.keys()}};
}
ValueType value_conv_type(const Context& c) {
  if (c.kind.conv)
    return {c.shape.dtype, {num_states(c) * c.config.conv.size, c.config.hidden_size}};
  const DeltaConfig& delta = c.config.delta;
  const MambaConfig& mamba = c.config.mamba;
  return c.kind.mamba ? ValueType{c.shape.dtype, {num_states(c) * mamba.conv_size, mamba.inner()}}
                      : ValueType{c.shape.dtype, {num_states(c) * delta.conv_size, delta.values()}};
}
ValueType scan_states_type(const Context& c) {
  const MambaConfig& mamba = c.config.mamba;
  return {DType::kF32, {num_states(c) * mamba.num_heads * mamba.state_size, mamba.head_size}};
}
ValueType delta_states_type(const Context& c) {
  const DeltaConfig& delta = c.config.delta;
  return {DType::kF32, {num_states(c) * delta.num_value_heads * delta.key_size, delta.value_size}};
}

/// kv and gate of the last tokens of each sequence, of which entries of that size are made.
ValueType last_tokens_type(const Context& c, int64_t size) {
  const int64_t parts = c.kind.compression == Compression::kSparse ? 2 : 1;
  return {c.shape.dtype,
          {num_states(c) * 2 * c.config.compressed.rate(c.kind.compression), 2 * parts * size}};
}
ValueType compress_state_type(const Context& c) {
  return last_tokens_type(c, c.config.head_dim());
}
ValueType index_state_type(const Context& c) {
  return last_tokens_type(c, c.config.index.head_size);
}

bool in_layers(const Context& c) {
  return c.role == ProgramRole::kLayer;
}
bool in_attention(const Context& c) {
  return in_layers(c) && c.kind.attends();
}
/// Whether what tokens see is found by their positions.
bool in_compressed(const Context& c) {
  return in_attention(c) && c.kind.compression != Compression::kNone;
}
bool in_rotated(const Context& c) {
  return (in_attention(c) && c.config.of_layer(c.kind).rotary_dim() > 0) || in_compressed(c);
}
bool in_tempered(const Context& c) {
  return in_attention(c) && c.config.of_layer(c.kind).temperature_scale != 0;
}
bool in_mixers(const Context& c) {
  return in_layers(c) && !c.kind.no_mixer;
}
bool in_cached(const Context& c) {
  return in_layers(c) && c.cache.has_value();
}
bool in_cached_attention(const Context& c) {
  return in_cached(c) && in_attention(c);
}
/// Where keys are not the values as well.
bool in_cached_values(const Context& c) {
  return in_cached_attention(c) && !c.config.is_compressed();
}
bool in_compressed_cache(const Context& c) {
  return in_cached(c) && in_compressed(c);
}
bool in_index_state(const Context& c) {
  return in_compressed_cache(c) && chooses_entries(c.config, c.kind, c.shape, c.cache);
}
bool in_indexed_cache(const Context& c) {
  return in_index_state(c) || (in_cached_attention(c) && chooses_keys(c.config, c.shape, c.cache));
}
bool in_cached_delta(const Context& c) {
  return in_cached(c) && c.kind.delta;
}
bool in_cached_mamba(const Context& c) {
  return in_cached(c) && c.kind.mamba;
}
bool in_cached_recurrence(const Context& c) {
  return in_cached_delta(c) || in_cached_mamba(c);
}
bool in_cached_convolution(const Context& c) {
  return in_cached_recurrence(c) || (in_cached(c) && c.kind.conv);
}
bool in_paged(const Context& c) {
  return in_cached_attention(c) && c.cache->is_paged();
}
bool in_slots(const Context& c) {
  return in_cached(c) && (c.kind.keeps_state() || in_compressed(c)) && c.cache->is_paged();
}
/// Positions say as much of tokens that see compressed ones.
bool in_lengths(const Context& c) {
  return !in_compressed(c) && (in_cached_attention(c) || in_slots(c));
}
bool in_contiguous(const Context& c) {
  return in_cached(c) && in_mixers(c) && !c.cache->is_paged();
}
bool in_packed(const Context& c) {
  return in_mixers(c) && !c.cache;
}
bool in_chunked(const Context& c) {
  return in_packed(c) && in_attention(c) && sees_chunks(c.config, c.kind);
}
bool in_embedding(const Context& c) {
  return c.role == ProgramRole::kEmbedding;
}
bool in_head(const Context& c) {
  return c.role == ProgramRole::kHead;
}
bool in_spread_head(const Context& c) {
  return in_head(c) && c.groups.tp->size() > 1;
}
bool in_logits(const Context& c) {
  return c.role == ProgramRole::kLogits;
}
bool in_choice(const Context& c) {
  return in_logits(c) && c.chosen_rows > 0;
}
bool in_choice_of_some(const Context& c) {
  return in_choice(c) && c.chosen_rows < own_tokens(c.shape, c.groups);
}
bool not_in_embedding(const Context& c) {
  return !in_embedding(c);
}
bool in_body(const Context& c) {
  return in_layers(c) || in_embedding(c);
}
/// Where tokens see some keys alone, logits are not measured.
bool in_clipped(const Context& c) {
  return in_packed(c) && in_attention(c) && c.shape.qk_clip > 0 && !in_compressed(c) &&
         !chooses_keys(c.config, c.shape, c.cache);
}
bool in_moe(const Context& c) {
  return in_layers(c) && c.kind.moe;
}
/// Whether training evens the loads out.
bool in_balanced_moe(const Context& c) {
  return in_moe(c) && !c.kind.hash;
}
bool in_hash_moe(const Context& c) {
  return in_moe(c) && c.kind.hash;
}
/// Whether sequences have bounds that something reads: a mixer, or a router that balances within
/// them.
bool in_bounded(const Context& c) {
  const bool balanced = in_balanced_moe(c) && !c.cache &&
                        c.config.moe.balance_scope == BalanceTokens::kSequence &&
                        !spreads_balance(c.config, c.groups);
  return (in_packed(c) && !in_chunked(c) && !in_compressed(c)) || in_paged(c) || in_slots(c) ||
         balanced;
}
bool in_biased_moe(const Context& c) {
  return in_balanced_moe(c) && c.config.moe.has_expert_bias();
}
bool in_globally_balanced(const Context& c) {
  return in_balanced_moe(c) && c.config.moe.balance_scope == BalanceTokens::kGlobalBatch;
}
bool in_spread_balance(const Context& c) {
  return in_balanced_moe(c) && spreads_balance(c.config, c.groups);
}
bool in_shared_capacity(const Context& c) {
  return in_moe(c) && shares_capacity(c.config.moe, c.groups);
}
bool in_weighted_head(const Context& c) {
  return in_head(c) && c.shape.weighted_tokens;
}
bool in_replaying_moe(const Context& c) {
  return in_balanced_moe(c) && c.shape.replays_routing;
}
bool in_telling_moe(const Context& c) {
  return in_moe(c) && c.shape.tells_routing;
}
bool in_numbering_moe(const Context& c) {
  return in_moe(c) && numbers_tokens(c.config.moe, c.shape);
}
bool in_noisy_moe(const Context& c) {
  return in_moe(c) && takes_noise(c.config.of_layer(c.kind).moe, c.shape);
}
bool in_predicting(const Context& c) {
  return in_layers(c) && c.kind.mtp;
}

constexpr auto kIn = PortUse::kInput;
constexpr auto kInPlace = PortUse::kInPlace;
constexpr auto kOut = PortUse::kOutput;

constexpr PortRule kRules[] = {
    {Port::kHidden, "hidden", kIn, "hidden states of own tokens", hidden_type, not_in_embedding},
    {Port::kPositions, "positions", kIn, "of the tokens that are rotated", rotated_ids, in_rotated},
    {Port::kCuSeqlens, "cu_seqlens", kIn, "bounds of the micro-batch's sequences", sequence_bounds,
     in_bounded},
    {Port::kChunkBounds, "chunk_bounds", kIn, "bounds of the sequences' chunks", chunk_bounds_type,
     in_chunked},
    {Port::kTemperatures, "temperatures", kIn, "factors of the queries of the tokens rotated",
     temperatures_type, in_tempered},
    {Port::kTokens, "tokens", kIn, "ids of the group's tokens", group_ids, in_embedding},
    {Port::kLabels, "labels", kIn, "of own tokens; -100: no loss", own_ids, in_head},
    {Port::kGatheredLabels, "gathered_labels", kIn, "of the group's tokens", group_ids,
     in_spread_head},
    {Port::kLossScale, "scale", kIn, "factor of the loss", one_f32, in_head},
    {Port::kTokenWeights, "token_weights", kIn, "factors of own tokens' losses", own_losses,
     in_weighted_head},
    {Port::kHiddenOut, "hidden_out", kOut, "hidden states of own tokens", hidden_type, in_body},
    {Port::kLoss, "loss", kOut, "scale times the sum over own valid tokens", one_f32, in_head},
    {Port::kTokenLoss, "token_loss", kOut, "of own tokens", own_losses, in_head},
    {Port::kLogits, "logits", kOut, "of the next token", logits_type, in_logits},
    {Port::kMaxLogits, "max_logits", kOut, "largest attention logits (MaxLogits)", by_head,
     in_clipped},
    {Port::kExpertBias, "expert_bias", kIn, "added to scores for the choice", by_expert,
     in_biased_moe},
    {Port::kEarlierCounts, "earlier_counts", kIn, "assignments of the step so far (RunningCounts)",
     by_expert, in_globally_balanced},
    {Port::kSegments, "segments", kIn, "which tokens are balanced together", own_ids,
     in_spread_balance},
    {Port::kTokenOrder, "token_order", kIn, "of all ranks' tokens (SharedCapacity)", batch_ids,
     in_shared_capacity},
    {Port::kReplayedExperts, "replayed_experts", kIn,
     "choices for own tokens; -1: the router's own", own_choices, in_replaying_moe},
    {Port::kOwnTokens, "own_tokens", kIn, "ids of own tokens", own_ids, in_hash_moe},
    {Port::kTokenNumbers, "token_numbers", kIn, "of own tokens in the step", token_numbers_type,
     in_numbering_moe},
    {Port::kNoise, "noise", kIn, "of the step and the layer (ops/noise.h)", noise_type,
     in_noisy_moe},
    {Port::kBalanceLoss, "balance_loss", kOut, "this rank's part", one_f32, in_balanced_moe},
    {Port::kZLoss, "z_loss", kOut, "mean over own tokens", one_f32, in_moe},
    {Port::kScoreMeans, "score_means", kOut, "means over own tokens", by_expert, in_balanced_moe},
    {Port::kCounts, "counts", kOut, "assignments of own tokens", by_expert, in_moe},
    {Port::kDropped, "dropped", kOut, "own assignments without room", one_count, in_moe},
    {Port::kCountsSoFar, "counts_so_far", kOut, "the next micro-batch's earlier_counts", by_expert,
     in_globally_balanced},
    {Port::kChosenExperts, "chosen_experts", kOut, "choices of own tokens", own_choices,
     in_telling_moe},
    {Port::kStart, "start", kIn, "tokens in the caches", one_i32, in_contiguous},
    {Port::kCacheLength, "cache_length", kIn, "tokens of each sequence, those given now included",
     cache_lengths, in_lengths},
    {Port::kKeyCache, "key_cache", kInPlace, "keys of all tokens so far", key_cache_type,
     in_cached_attention},
    {Port::kValueCache, "value_cache", kInPlace, "values of all tokens so far", value_cache_type,
     in_cached_values},
    {Port::kIndexCache, "index_cache", kInPlace, "the indexer's keys of all tokens so far",
     index_cache_type, in_indexed_cache},
    {Port::kCacheRows, "cache_rows", kIn, "of the tokens given now, in the pages", batch_ids,
     in_paged},
    {Port::kPageTable, "page_table", kIn, "pages of each sequence", page_table_type, in_paged},
    {Port::kCacheSlots, "cache_slots", kIn, "where each sequence's states are", cache_lengths,
     in_slots},
    {Port::kQueryConvState, "query_conv_state", kInPlace,
     "last inputs of the queries' convolution, or of C's", key_conv_type, in_cached_recurrence},
    {Port::kKeyConvState, "key_conv_state", kInPlace, "and of the keys', or B's", key_conv_type,
     in_cached_recurrence},
    {Port::kValueConvState, "value_conv_state", kInPlace,
     "and of the values', or x's, or of a gated convolution", value_conv_type,
     in_cached_convolution},
    {Port::kDeltaStates, "delta_states", kInPlace, "states of the value heads (GatedDeltaCached)",
     delta_states_type, in_cached_delta},
    {Port::kScanStates, "scan_states", kInPlace, "states of the heads (SsdScanCached)",
     scan_states_type, in_cached_mamba},
    {Port::kCompressState, "compress_state", kInPlace, "last tokens' part in entries to come",
     compress_state_type, in_compressed_cache},
    {Port::kIndexState, "index_state", kInPlace, "and in the indexer's", index_state_type,
     in_index_state},
    {Port::kChosenRows, "chosen_rows", kIn, "the tokens whose next ones are chosen", chosen_ids,
     in_choice_of_some},
    {Port::kTokenRules, "token_rules", kIn, "how (TokenRule)", token_rules_type, in_choice},
    {Port::kChosenToken, "chosen_token", kOut, "the next token, or the one given", chosen_ids,
     in_choice},
    {Port::kChosenLogProbability, "chosen_log_probability", kOut, "its own", chosen_numbers,
     in_choice},
    {Port::kEmbedded, "embedded", kIn, "embeddings of the tokens to predict from", hidden_type,
     in_predicting},
};

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kRules); ++i) {
    if (static_cast<size_t>(kRules[i].port) != i) return false;
  }
  return std::size(kRules) == kNumPorts;
}
static_assert(in_order(), "a rule for every port, in their order");

}  // namespace

std::span<const PortRule> port_rules() {
  return kRules;
}

const PortRule& port_rule(Port port) {
  return kRules[number_of(port)];
}

Port PortMap::port_of(ValueId id) const {
  const auto found = std::ranges::find_if(
      kRules, [&](const PortRule& rule) { return has(rule.port) && at(rule.port) == id; });
  ensure(found != std::end(kRules), "value {} has no port", id);
  return found->port;
}

ValueId add_port(Program& program, PortMap& ports, Port port, const PortContext& context) {
  if (ports.has(port)) return ports.at(port);
  const PortRule& rule = port_rule(port);
  ensure(rule.use != PortUse::kOutput, "port '{}' is an output", rule.name);
  const std::string name(rule.name);
  const ValueType type = rule.type(context);
  ports.set(port, rule.use == PortUse::kInPlace ? program.add_accumulator(name, type)
                                                : program.add_input(name, type));
  return ports.at(port);
}

void set_port_outputs(Program& program, const PortMap& ports) {
  std::vector<ValueId> outputs;
  for (const PortRule& rule : kRules) {
    if (rule.use == PortUse::kOutput && ports.has(rule.port))
      outputs.push_back(ports.at(rule.port));
  }
  program.set_outputs(std::move(outputs));
}

void finish_ports(Program& program, const PortMap& ports, const PortContext& context) {
  for (const PortRule& rule : kRules) {
    ensure(ports.has(rule.port) == rule.present(context), "program {} {} port '{}'", program.name(),
           ports.has(rule.port) ? "may not have" : "lacks", rule.name);
    if (!ports.has(rule.port)) continue;
    const ValueType& type = program.type(ports.at(rule.port));
    ensure(type == rule.type(context), "port '{}' of program {} is {}, expected {}", rule.name,
           program.name(), type.to_string(), rule.type(context).to_string());
  }
  set_port_outputs(program, ports);
}

}  // namespace tessera
