#include "model/mixers/index_blocks.h"

#include "ops/cache_append/cache_append.h"
#include "ops/index_topk/index_topk.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/linear/linear.h"
#include "ops/paged_attention/paged_attention.h"

namespace tessera {
namespace {

/// Hugging Face's models have no key for it.
constexpr double kNormEps = 1e-6;

struct IndexWeights {
  ValueId q, k, norm, bias, weights;
};

/// Every rank of the tensor-parallel group holds them whole: the choice is one for all heads.
IndexWeights add_index_weights(LayerBuilder& builder) {
  const ModelConfig& config = builder.config;
  const IndexConfig& index = config.index;
  const auto matrix = [&](const char* name, int64_t rows, int64_t width) {
    return builder.constant_matrix(name, builder.whole({rows, width}));
  };
  const auto vector = [&](const char* name) {
    return builder.constant(name, builder.whole({index.head_size}));
  };
  return {
      .q = matrix("index.q.weight", index.num_heads * index.head_size, config.latent.query_rank),
      .k = matrix("index.k.weight", index.head_size, config.hidden_size),
      .norm = vector("index.k_norm.weight"),
      .bias = vector("index.k_norm.bias"),
      .weights = matrix("index.weights.weight", index.num_heads, config.hidden_size)};
}

IndexSpec index_spec(const LayerBuilder& builder) {
  const IndexConfig& index = builder.config.index;
  return {.num_heads = index.num_heads,
          .head_size = index.head_size,
          .top_k = index.top_k,
          .sequence_length = builder.shape.sequence_length};
}

/// Appends the index keys to a cache and chooses among it.
ValueId choose_cached(LayerBuilder& builder, const IndexValues& index, ValueId cache) {
  Program& program = builder.program();
  program.add(make_cache_append(builder.cache->capacity), {index.k, builder.port(Port::kStart)}, {},
              {cache});
  return program.add1(make_index_topk_cached(index_spec(builder)),
                      {index.q, index.weights, cache, builder.port(Port::kCacheLength)},
                      "chosen_keys");
}

ValueId choose_paged(LayerBuilder& builder, const IndexValues& index, ValueId cache) {
  Program& program = builder.program();
  program.add(make_page_write(builder.cache->num_pages * kPageTokens),
              {index.k, builder.port(Port::kCacheRows)}, {}, {cache});
  return program.add1(make_index_topk_paged(index_spec(builder)),
                      {index.q, index.weights, cache, builder.port(Port::kCuSeqlens),
                       builder.port(Port::kCacheLength), builder.port(Port::kPageTable)},
                      "chosen_keys");
}

}  // namespace

IndexValues build_index(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                        ValueId query_latent, RotarySpec rotary) {
  const IndexWeights weights = add_index_weights(builder);
  if (!chooses_keys(builder.config, builder.shape, builder.cache)) return {};
  const IndexConfig& index = builder.config.index;
  Program& program = builder.program();
  const auto gathered = [&](ValueId x, const char* name) {
    return share.by_heads ? builder.gather_tokens(x, name) : x;
  };
  const ValueId keys = program.add1(make_linear(), {normed, weights.k}, "index_k");
  const ValueId normed_keys =
      program.add1(make_layer_norm(kNormEps), {keys, weights.norm, weights.bias}, "index_k_normed");
  const ValueId factors = program.add1(make_linear(), {normed, weights.weights}, "index_weights");
  const ValueId queries = program.add1(make_linear(), {query_latent, weights.q}, "index_q");
  rotary.num_heads = index.num_heads;
  rotary.head_size = index.head_size;
  rotary.offset = 0;
  rotary.interleaved = index.interleaved;
  const auto rotated = program.add(
      make_rope(std::move(rotary), 1),
      {queries, gathered(normed_keys, "index_k_gathered"), builder.port(Port::kPositions)},
      {"index_q_rotated", "index_k_rotated"});
  return {.q = rotated[Rope::kY],
          .weights = gathered(factors, "index_weights_gathered"),
          .k = rotated[Rope::kSecondY]};
}

ValueId build_choice(LayerBuilder& builder, const IndexValues& index) {
  if (!builder.cache) {
    return builder.program().add1(make_index_topk(index_spec(builder)),
                                  {index.q, index.weights, index.k, builder.port(Port::kCuSeqlens)},
                                  "chosen_keys");
  }
  const ValueId cache = builder.port(Port::kIndexCache);
  return builder.cache->is_paged() ? choose_paged(builder, index, cache)
                                   : choose_cached(builder, index, cache);
}

}  // namespace tessera
