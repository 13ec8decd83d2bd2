#include "model/config/index_options.h"

#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {

void add_index_options(ConfigSchema& schema, IndexConfig& index) {
  schema.add("index.top_k", &index.top_k,
             "Keys that a token of latent attention sees at most, chosen by an indexer as "
             "DeepSeek-V3.2 has it, or compressed ones in the layers of compressed.sparse_layers; "
             "its weights are loaded and not trained; 0: it sees all",
             between(0, kMaxLength));
  schema.add("index.num_heads", &index.num_heads, "Query heads of the indexer",
             between(1, kMaxHeads));
  schema.add("index.head_size", &index.head_size, "Size of a head of the indexer",
             between(2, kMaxWidth));
  schema.add("index.interleaved", &index.interleaved,
             "Rotary pairs of the indexer's heads are neighbours, as GLM-5 has them");
}

namespace {

/// An indexer of compressed tokens.
void validate_entry_index(const ModelConfig& config) {
  const IndexConfig& index = config.index;
  require(!config.compressed.sparse_layers.empty(),
          "index.top_k is {}, but the indexer chooses in the layers of compressed.sparse_layers, "
          "and there are none; list some, or leave [index] out",
          index.top_k);
  require(index.head_size >= config.compressed.rope_size,
          "index.head_size {} is below compressed.rope_size {}, the elements of it that are "
          "rotated; set it to {} or more",
          index.head_size, config.compressed.rope_size, config.compressed.rope_size);
  require(!index.interleaved,
          "index.interleaved is of latent attention; with model.attention = \"compressed\" an "
          "indexer's heads are rotated as compressed_rope.interleaved says");
}

}  // namespace

void validate_index(const ModelConfig& config) {
  const IndexConfig& index = config.index;
  if (!index.is_on()) {
    require(index == IndexConfig{},
            "[index] is set, but index.top_k is 0, so that there is no indexer; set index.top_k, "
            "such as 2048, or leave [index] out");
    return;
  }
  if (config.is_compressed()) return validate_entry_index(config);
  require(config.is_latent() && config.latent.query_rank > 0,
          "index.top_k is {}, but the indexer reads the query latent, and there is none; set "
          "model.attention = \"latent\" and latent.query_rank, or leave [index] out",
          index.top_k);
  require(index.head_size >= config.latent.rope_size,
          "index.head_size {} is below latent.rope_size {}, the elements of it that are rotated; "
          "set it to {} or more",
          index.head_size, config.latent.rope_size, config.latent.rope_size);
  require(
      config.rotary_dim() > 0,
      "index.top_k is {}, whose queries and keys are rotated, but rope.fraction is 0; leave one "
      "of them out",
      index.top_k);
  require(config.window == 0,
          "index.top_k chooses what tokens see, and model.window {} bounds it; leave one of them "
          "out",
          config.window);
}

}  // namespace tessera
