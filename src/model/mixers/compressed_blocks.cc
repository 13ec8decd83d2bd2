#include "model/mixers/compressed_blocks.h"

#include <memory>

#include "model/mixers/entry_blocks.h"
#include "ops/block_linear/block_linear.h"
#include "ops/unit_norm/unit_norm.h"

namespace tessera {
namespace {

/// The rotation of the last elements of so many heads.
RotarySpec of_heads(const LayerBuilder& builder, RotarySpec rotary, int64_t num_heads) {
  rotary.num_heads = num_heads;
  rotary.head_size = builder.config.head_dim();
  rotary.offset = rotary.head_size - rotary.rotary_dim();
  return rotary;
}

ValueId rotate_heads(LayerBuilder& builder, ValueId x, const RotarySpec& rotary, int64_t num_heads,
                     bool back, const std::string& name) {
  if (builder.config.rotary_dim() == 0) return x;
  return builder.program().add1(std::make_shared<Rope>(of_heads(builder, rotary, num_heads), back),
                                {x, builder.port(Port::kPositions)}, name);
}

/// Latents, not hidden states, are gathered over the tensor-parallel group: they are smaller.
ValueId gather_shared(LayerBuilder& builder, const AttentionShare& share, ValueId x,
                      const std::string& name) {
  return share.by_heads ? builder.gather_tokens(x, name) : x;
}

ValueId build_query_latent(LayerBuilder& builder, const AttentionShare& share, ValueId normed) {
  const ModelConfig& config = builder.config;
  const int64_t rank = config.compressed.query_rank;
  const ValueId down = builder.linear("attn.q_down", normed, rank, false, "q_latent");
  const ValueId latent = builder.norm("attn.q_latent_norm", down, rank, config.norm_eps);
  return gather_shared(builder, share, latent, "q_latent_gathered");
}

ValueId build_queries(LayerBuilder& builder, const AttentionShare& share, ValueId latent,
                      const RotarySpec& rotary) {
  const ModelConfig& config = builder.config;
  const Shape global = {config.num_heads * config.head_dim(), config.compressed.query_rank};
  const ValueId up =
      builder.column_linear("attn.q_up", latent, head_rows(global, true, share, builder),
                            share.by_heads ? 1 : builder.tp(), false, "q");
  const ValueId unit =
      builder.program().add1(make_unit_norm(config.head_dim(), config.norm_eps), {up}, "q_normed");
  return rotate_heads(builder, unit, rotary, share.num_heads, false, "q_rotated");
}

ValueId build_keys(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                   const RotarySpec& rotary) {
  const ModelConfig& config = builder.config;
  const ValueId keys = builder.linear("attn.kv", normed, config.head_dim(), false, "kv");
  const ValueId own = builder.norm("attn.kv_norm", keys, config.head_dim(), config.norm_eps);
  return rotate_heads(builder, gather_shared(builder, share, own, "kv_gathered"), rotary, 1, false,
                      "kv_rotated");
}

}  // namespace

QueryKeyValue build_compressed(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                               RotarySpec rotary) {
  const ValueId latent = build_query_latent(builder, share, normed);
  const ValueId q = build_queries(builder, share, latent, rotary);
  const ValueId keys = build_keys(builder, share, normed, rotary);
  if (builder.kind.compression == Compression::kNone) return {.q = q, .k = keys, .v = keys};
  const EntryKeys all = build_entries(builder, share, normed, latent, keys, rotary);
  return {.q = q, .k = all.keys, .v = all.keys, .chosen = all.chosen};
}

ValueId build_grouped_output(LayerBuilder& builder, const AttentionShare& share, ValueId attended,
                             RotarySpec rotary) {
  const ModelConfig& config = builder.config;
  const CompressedConfig& compressed = config.compressed;
  const int64_t parts = share.by_heads ? builder.tp() : 1;
  const int64_t inner = compressed.output_groups * compressed.output_rank;
  const int64_t columns = config.num_heads * config.head_dim() / compressed.output_groups;
  const ValueId turned =
      rotate_heads(builder, attended, rotary, share.num_heads, true, "attn_turned_back");
  const int64_t groups = compressed.output_groups / parts;
  const ValueId down = builder.matrix(
      "attn.o_down.weight",
      {.slice = head_rows({inner, columns}, true, share, builder),
       .tp_copies = share.by_heads ? 1 : builder.tp(),
       .matrix_rows = std::vector<int64_t>(compressed.output_groups, compressed.output_rank)});
  const ValueId low =
      builder.program().add1(make_block_linear(groups), {turned, down}, "attn_out_latent");
  if (share.by_heads)
    return builder.row_linear("attn.o_up", low, inner, config.hidden_size, false, "attn_projected");
  return builder.linear("attn.o_up", low, config.hidden_size, false, "attn_projected");
}

}  // namespace tessera
