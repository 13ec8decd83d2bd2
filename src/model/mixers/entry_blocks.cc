#include "model/mixers/entry_blocks.h"

#include <algorithm>
#include <memory>

#include "ops/cache_append/cache_append.h"
#include "ops/compress_windows/compress_cached.h"
#include "ops/index_topk/index_topk.h"
#include "ops/join_rows/join_rows.h"
#include "ops/paged_attention/paged_attention.h"
#include "ops/window_choice/window_choice.h"

namespace tessera {
namespace {

/// The weights of one compressor, whose names begin with `name`.
struct CompressorWeights {
  ValueId kv, gate, bias, norm;
};

/// A compressor: entries of `size` elements.
struct Compressor {
  std::string name;
  int64_t size;
  CompressSpec spec;
  CompressorWeights weights;
};

CompressSpec compress_spec(const LayerBuilder& builder) {
  return {.rate = builder.config.compressed.rate(builder.kind.compression),
          .overlaps = builder.kind.compression == Compression::kSparse};
}

/// Every rank of the tensor-parallel group holds them whole: entries are those of all heads. An
/// indexer's are not trained.
Compressor add_compressor(LayerBuilder& builder, const std::string& name, int64_t size,
                          bool constant) {
  const CompressSpec spec = compress_spec(builder);
  const int64_t width = spec.parts() * size;
  const auto matrix = [&](const char* part) {
    const std::string full = fmt::format("{}.{}.weight", name, part);
    WeightPlacement placement = builder.whole({width, builder.config.hidden_size});
    return constant ? builder.constant_matrix(full, std::move(placement))
                    : builder.matrix(full, std::move(placement));
  };
  const auto in_f32 = [&](const char* part, const Shape& shape) {
    const std::string full = fmt::format("{}.{}", name, part);
    return constant ? builder.constant(full, builder.whole(shape))
                    : builder.f32_weight(full, builder.whole(shape));
  };
  return {.name = name,
          .size = size,
          .spec = spec,
          .weights = {.kv = matrix("kv"),
                      .gate = matrix("gate"),
                      .bias = in_f32("position_bias", {spec.rate, width}),
                      .norm = in_f32("norm.weight", {size})}};
}

/// The last elements of heads are rotated.
RotarySpec of_entry_heads(RotarySpec rotary, int64_t num_heads, int64_t size) {
  rotary.num_heads = num_heads;
  rotary.head_size = size;
  rotary.offset = size - rotary.rotary_dim();
  return rotary;
}

ValueId rotate_entries(LayerBuilder& builder, ValueId x, const RotarySpec& rotary,
                       ValueId positions, const std::string& name) {
  if (builder.config.rotary_dim() == 0) return x;
  return builder.program().add1(make_rope(rotary), {x, positions}, name);
}

/// What compresses tokens has of them.
struct Compressed {
  ValueId entries;
  ValueId positions;  ///< of their windows' first tokens
  ValueId rows = -1;  ///< where they belong in a cache
};

/// Where a compressor's entries are kept.
struct EntryCache {
  Port cache;
  Port state;
  int64_t first_entry;  ///< rows before them
};

KeptRows kept_rows(const LayerBuilder& builder) {
  if (!builder.cache) return KeptRows::kPacked;
  return builder.cache->is_paged() ? KeptRows::kPaged : KeptRows::kCached;
}

/// Beside positions, what says whose the tokens are.
void add_kept_inputs(LayerBuilder& builder, std::vector<ValueId>& inputs) {
  if (kept_rows(builder) != KeptRows::kPaged) return;
  for (const Port port : {Port::kCuSeqlens, Port::kPageTable}) inputs.push_back(builder.port(port));
}

Compressed compress_windows(LayerBuilder& builder, const Compressor& compressor,
                            const EntryCache& kept, std::vector<ValueId> inputs) {
  Program& program = builder.program();
  std::vector<std::string> names = {compressor.name + "_entries",
                                    compressor.name + "_entry_positions"};
  if (!builder.cache) {
    const auto made = program.add(make_compress_windows(compressor.spec), inputs, names);
    return {made[CompressWindows::kEntries], made[CompressWindows::kEntryPositions]};
  }
  add_kept_inputs(builder, inputs);
  if (builder.has_slots()) inputs.push_back(builder.port(Port::kCacheSlots));
  names.push_back(compressor.name + "_entry_rows");
  using Op = CompressWindowsCached;
  const auto made = program.add(
      make_compress_windows_cached({.windows = compressor.spec,
                                    .kept = kept_rows(builder),
                                    .num_slots = builder.has_slots() ? builder.cache->num_slots : 1,
                                    .first_entry = kept.first_entry}),
      inputs, names, {builder.port(kept.state)});
  return {made[Op::kEntries], made[Op::kEntryPositions], made[Op::kEntryRows]};
}

/// Entries of the group's tokens, normed and rotated as the first token of their window is; behind
/// a cache, that with them.
ValueId compress_tokens(LayerBuilder& builder, const AttentionShare& share,
                        const Compressor& compressor, const EntryCache& kept, ValueId normed,
                        const RotarySpec& rotary) {
  Program& program = builder.program();
  const auto projected = [&](ValueId weight, const char* part) {
    const std::string name = fmt::format("{}_{}", compressor.name, part);
    const ValueId own = program.add1(make_linear(), {normed, weight}, name);
    return share.by_heads ? builder.gather_tokens(own, name + "_gathered") : own;
  };
  const CompressorWeights& weights = compressor.weights;
  const ValueId kv = projected(weights.kv, "kv");
  const ValueId gate = projected(weights.gate, "gate");
  const Compressed made = compress_windows(
      builder, compressor, kept, {kv, gate, weights.bias, builder.port(Port::kPositions)});
  const std::string norm = compressor.name + ".norm";
  const ValueId unit = program.add(make_rmsnorm(builder.config.norm_eps),
                                   {made.entries, weights.norm}, {norm, norm + ".rstd"})[0];
  const ValueId rotated = rotate_entries(builder, unit, of_entry_heads(rotary, 1, compressor.size),
                                         made.positions, compressor.name + "_rotated");
  if (!builder.cache) return rotated;
  const ValueId cache = builder.port(kept.cache);
  program.add(make_page_write(program.type(cache).shape[0]), {rotated, made.rows}, {}, {cache});
  return cache;
}

/// Entries of a sequence at most.
int64_t most_entries(const LayerBuilder& builder) {
  return num_entry_rows(longest_sequence(builder.shape, builder.cache),
                        builder.config.compressed.rate(builder.kind.compression));
}

/// Whether an indexer chooses.
bool has_choice(const LayerBuilder& builder) {
  return chooses_entries(builder.config, builder.kind, builder.shape, builder.cache);
}

/// Rows of the layer's cache; none where there is no cache.
EntryRows rows_of_cache(const LayerBuilder& builder) {
  return builder.cache ? cached_rows(builder.config, builder.kind, *builder.cache) : EntryRows{};
}

WindowChoiceSpec choice_spec(const LayerBuilder& builder) {
  const CompressedConfig& compressed = builder.config.compressed;
  const int64_t all = most_entries(builder);
  return {.window = std::min(builder.config.window, longest_sequence(builder.shape, builder.cache)),
          .rate = compressed.rate(builder.kind.compression),
          .entries = has_choice(builder) ? builder.config.index.top_k : all,
          .kept = kept_rows(builder),
          .first_entry = rows_of_cache(builder).tokens};
}

/// The indexer of a sparse layer: what it chooses, or -1 where all entries are seen, where there
/// are its weights alone.
ValueId choose_entries(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                       ValueId query_latent, const RotarySpec& rotary) {
  const ModelConfig& config = builder.config;
  const IndexConfig& index = config.index;
  Program& program = builder.program();
  const int64_t width = index.num_heads * index.head_size;
  const Compressor compressor = add_compressor(builder, "index", index.head_size, true);
  const ValueId q = builder.constant_matrix("index.q.weight",
                                            builder.whole({width, config.compressed.query_rank}));
  const ValueId weights = builder.constant_matrix(
      "index.weights.weight", builder.whole({index.num_heads, config.hidden_size}));
  if (!has_choice(builder)) return -1;
  const EntryCache kept = {Port::kIndexCache, Port::kIndexState, 0};
  const ValueId keys = compress_tokens(builder, share, compressor, kept, normed, rotary);
  const ValueId queries =
      rotate_entries(builder, program.add1(make_linear(), {query_latent, q}, "index_q"),
                     of_entry_heads(rotary, index.num_heads, index.head_size),
                     builder.port(Port::kPositions), "index_q_rotated");
  const ValueId own = program.add1(make_linear(), {normed, weights}, "index_weights");
  const ValueId factors =
      share.by_heads ? builder.gather_tokens(own, "index_weights_gathered") : own;
  std::vector<ValueId> inputs = {queries, factors, keys, builder.port(Port::kPositions)};
  add_kept_inputs(builder, inputs);
  const IndexSpec spec = {.num_heads = index.num_heads,
                          .head_size = index.head_size,
                          .top_k = index.top_k,
                          .sequence_length = builder.shape.sequence_length};
  return program.add1(make_index_topk_entries(spec, compressor.spec.rate, kept_rows(builder)),
                      inputs, "chosen_entries");
}

/// Keys of the tokens in hand into the cache that has entries behind all tokens' keys.
void append_keys(LayerBuilder& builder, ValueId keys, ValueId cache) {
  Program& program = builder.program();
  const int64_t rows = program.type(cache).shape[0];
  const bool paged = builder.cache->is_paged();
  const OperatorPtr op = paged ? make_page_write(rows) : make_cache_append(rows);
  program.add(op, {keys, builder.port(paged ? Port::kCacheRows : Port::kStart)}, {}, {cache});
}

}  // namespace

EntryKeys build_entries(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                        ValueId query_latent, ValueId keys, const RotarySpec& rotary) {
  Program& program = builder.program();
  const Compressor compressor =
      add_compressor(builder, "compress", builder.config.head_dim(), false);
  const EntryCache kept = {Port::kKeyCache, Port::kCompressState, rows_of_cache(builder).tokens};
  const ValueId entries = compress_tokens(builder, share, compressor, kept, normed, rotary);
  std::vector<ValueId> inputs = {builder.port(Port::kPositions)};
  add_kept_inputs(builder, inputs);
  ValueId chosen = -1;
  if (builder.kind.compression == Compression::kSparse)
    chosen = choose_entries(builder, share, normed, query_latent, rotary);
  if (chosen >= 0) inputs.push_back(chosen);
  const ValueId rows =
      program.add1(make_window_choice(choice_spec(builder), chosen >= 0), inputs, "chosen_rows");
  if (builder.cache) {
    append_keys(builder, keys, entries);
    return {.keys = entries, .chosen = rows};
  }
  return {.keys = program.add1(make_join_rows(), {keys, entries}, "keys_and_entries"),
          .chosen = rows};
}

SparseSight entry_sight(const LayerBuilder& builder) {
  if (builder.cache) return {};  // tokens see about as much as they may
  const WindowChoiceSpec spec = choice_spec(builder);
  return {.window = spec.window, .rate = spec.rate, .entries = spec.entries};
}

}  // namespace tessera
