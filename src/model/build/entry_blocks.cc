#include "model/build/entry_blocks.h"

#include <algorithm>
#include <memory>

#include "ops/compress_windows/compress_windows.h"
#include "ops/index_topk/index_topk.h"
#include "ops/join_rows/join_rows.h"
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

/// Entries of the group's tokens, normed and rotated as the first token of their window is.
ValueId compress_tokens(LayerBuilder& builder, const AttentionShare& share,
                        const Compressor& compressor, ValueId normed, const RotarySpec& rotary) {
  Program& program = builder.program();
  const auto projected = [&](ValueId weight, const char* part) {
    const std::string name = fmt::format("{}_{}", compressor.name, part);
    const ValueId own = program.add1(make_linear(), {normed, weight}, name);
    return share.by_heads ? builder.gather_tokens(own, name + "_gathered") : own;
  };
  const CompressorWeights& weights = compressor.weights;
  const ValueId kv = projected(weights.kv, "kv");
  const ValueId gate = projected(weights.gate, "gate");
  const auto entries =
      program.add(make_compress_windows(compressor.spec),
                  {kv, gate, weights.bias, builder.port(Port::kPositions)},
                  {compressor.name + "_entries", compressor.name + "_entry_positions"});
  const std::string norm = compressor.name + ".norm";
  const ValueId unit =
      program.add(make_rmsnorm(builder.config.norm_eps),
                  {entries[CompressWindows::kEntries], weights.norm}, {norm, norm + ".rstd"})[0];
  return rotate_entries(builder, unit, of_entry_heads(rotary, 1, compressor.size),
                        entries[CompressWindows::kEntryPositions], compressor.name + "_rotated");
}

/// Tokens of a sequence at most.
int64_t longest_sequence(const LayerBuilder& builder) {
  const BatchShape& shape = builder.shape;
  return shape.sequence_length > 0 ? shape.sequence_length : shape.num_tokens;
}

/// Entries of a sequence at most.
int64_t most_entries(const LayerBuilder& builder) {
  return num_entry_rows(longest_sequence(builder),
                        builder.config.compressed.rate(builder.kind.compression));
}

/// Whether an indexer chooses: some sequence may have more entries than it would.
bool chooses_entries(const LayerBuilder& builder) {
  return builder.kind.compression == Compression::kSparse &&
         most_entries(builder) > builder.config.index.top_k;
}

WindowChoiceSpec choice_spec(const LayerBuilder& builder) {
  const CompressedConfig& compressed = builder.config.compressed;
  const int64_t all = most_entries(builder);
  return {.window = std::min(builder.config.window, longest_sequence(builder)),
          .rate = compressed.rate(builder.kind.compression),
          .entries = chooses_entries(builder) ? builder.config.index.top_k : all};
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
  if (!chooses_entries(builder)) return -1;
  const ValueId keys = compress_tokens(builder, share, compressor, normed, rotary);
  const ValueId queries =
      rotate_entries(builder, program.add1(make_linear(), {query_latent, q}, "index_q"),
                     of_entry_heads(rotary, index.num_heads, index.head_size),
                     builder.port(Port::kPositions), "index_q_rotated");
  const ValueId own = program.add1(make_linear(), {normed, weights}, "index_weights");
  const ValueId factors =
      share.by_heads ? builder.gather_tokens(own, "index_weights_gathered") : own;
  return program.add1(make_index_topk_entries({.num_heads = index.num_heads,
                                               .head_size = index.head_size,
                                               .top_k = index.top_k,
                                               .sequence_length = builder.shape.sequence_length},
                                              compressor.spec.rate),
                      {queries, factors, keys, builder.port(Port::kPositions)}, "chosen_entries");
}

}  // namespace

EntryKeys build_entries(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                        ValueId query_latent, ValueId keys, const RotarySpec& rotary) {
  Program& program = builder.program();
  const Compressor compressor =
      add_compressor(builder, "compress", builder.config.head_dim(), false);
  const ValueId entries = compress_tokens(builder, share, compressor, normed, rotary);
  std::vector<ValueId> inputs = {builder.port(Port::kPositions)};
  if (builder.kind.compression == Compression::kSparse) {
    const ValueId chosen = choose_entries(builder, share, normed, query_latent, rotary);
    if (chosen >= 0) inputs.push_back(chosen);
  }
  return {.keys = program.add1(make_join_rows(), {keys, entries}, "keys_and_entries"),
          .chosen = program.add1(make_window_choice(choice_spec(builder), inputs.size() > 1),
                                 inputs, "chosen_rows")};
}

SparseSight entry_sight(const LayerBuilder& builder) {
  const WindowChoiceSpec spec = choice_spec(builder);
  return {.window = spec.window, .rate = spec.rate, .entries = spec.entries};
}

}  // namespace tessera
