#include "model/build/ports.h"
#include "ops/compress_windows/compress_windows.h"
#include "ops/paged_attention/paged_attention.h"

namespace tessera {

IndexRange attended_heads(const ModelConfig& config, const StageGroups& groups) {
  const int64_t tp = groups.policy.replicated_attention ? 1 : groups.tp->size();
  const int64_t count = config.num_heads / (tp * groups.heads->size());
  const int64_t first = tp == 1 ? 0 : groups.tp->rank() * (config.num_heads / tp);
  return {first + groups.heads->rank() * count, count};
}

bool caches_latents(const ModelConfig& config, const BatchShape& shape,
                    const std::optional<CacheShape>& cache) {
  const LatentConfig& latent = config.latent;
  return config.is_latent() && cache && cache->is_paged() && shape.products.recipe == nullptr &&
         latent.kv_rank <= kMostPagedHeadSizeV &&
         latent.kv_rank + latent.rope_size <= kMostPagedHeadSize;
}

CacheWidths cache_widths(const ModelConfig& config, const BatchShape& shape,
                         const std::optional<CacheShape>& cache) {
  if (caches_latents(config, shape, cache))
    return {config.latent.kv_rank + config.latent.rope_size, config.latent.kv_rank};
  if (config.is_compressed()) return {.keys = config.head_dim(), .values = 0};
  return {config.kv_heads() * config.head_dim(), config.kv_heads() * config.value_dim()};
}

bool chooses_keys(const ModelConfig& config, const BatchShape& shape,
                  const std::optional<CacheShape>& cache) {
  if (!config.index.is_on() || config.is_compressed()) return false;
  const int64_t in_batch = shape.sequence_length > 0 ? shape.sequence_length : shape.num_tokens;
  return (cache ? cache->capacity : in_batch) > config.index.top_k;
}

int64_t longest_sequence(const BatchShape& shape, const std::optional<CacheShape>& cache) {
  if (cache) return cache->capacity;
  return shape.sequence_length > 0 ? shape.sequence_length : shape.num_tokens;
}

bool chooses_entries(const ModelConfig& config, LayerKind kind, const BatchShape& shape,
                     const std::optional<CacheShape>& cache) {
  return kind.compression == Compression::kSparse &&
         num_entry_rows(longest_sequence(shape, cache), config.compressed.sparse_rate) >
             config.index.top_k;
}

EntryRows cached_rows(const ModelConfig& config, LayerKind kind, const CacheShape& cache) {
  const int64_t tokens = cache.is_paged() ? cache.num_pages * kPageTokens : cache.capacity;
  if (kind.compression == Compression::kNone) return {.tokens = tokens};
  // In pages an entry lies where the token of its number does: there is a page for each.
  const int64_t rate = config.compressed.rate(kind.compression);
  return {.tokens = tokens,
          .entries = cache.is_paged() ? tokens : num_entry_rows(cache.capacity, rate)};
}

bool spreads_balance(const ModelConfig& config, const StageGroups& groups) {
  switch (config.moe.balance_scope) {
    case BalanceTokens::kModel:
      return false;
    case BalanceTokens::kGlobalBatch:
      return true;
    case BalanceTokens::kMicroBatch:
    case BalanceTokens::kSequence:
      break;
  }
  return groups.token_ranks() > 1 || config.moe.top_p < 1 || config.moe.draw_experts ||
         groups.policy.plans_contexts;
}

bool shares_capacity(const MoeConfig& moe, const StageGroups& groups) {
  const bool of_all = moe.capacity_factor > 0 && moe.capacity_scope == CapacityScope::kSequence;
  return (of_all || moe.experts_choose()) && groups.token_ranks() > 1;
}

}  // namespace tessera
