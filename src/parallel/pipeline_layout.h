#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// How many layers a model has: decoder layers, and behind them those of multi-token prediction.
struct LayerCounts {
  int64_t decoder = 0;
  int64_t mtp = 0;
  bool mtp_beside_loss = false;  ///< those read the norms before it (ModelConfig::mtp_normed)
};

/// What one chunk of a pipeline holds of the model. Layers of multi-token prediction are numbered
/// on behind the decoder layers.
struct PipelineChunk {
  bool embedding = false;
  int64_t first_layer = 0;
  int64_t num_layers = 0;  ///< decoder layers
  int64_t num_mtp = 0;     ///< layers of multi-token prediction, behind them
  bool loss = false;       ///< final norm, head and loss

  int64_t all_layers() const { return num_layers + num_mtp; }
  bool operator==(const PipelineChunk&) const = default;
};

/// The chunks of a model in its order; chunk c belongs to stage c mod num_stages.
struct PipelineLayout {
  int64_t num_stages = 1;
  std::vector<PipelineChunk> chunks = {};

  int64_t chunks_per_stage() const { return std::ssize(chunks) / num_stages; }
};

/// Reads a layout as Megatron Core writes it (Megatron-Core MoE, section 7.5): E embedding, t a
/// decoder layer, m a layer of multi-token prediction, L loss; "|" between chunks, "*n" repeats
/// what is before it, parentheses group: "Et*3|(tt|)*2mL" is [E t t t] [t t] [t t] [m L]. Throws
/// UserError with the position of a mistake, and where the contents are not the model's layers
/// once, the embedding first, the loss last and every m behind every t (in the loss's chunk where
/// it must be), or the chunks no multiple of the stages.
PipelineLayout parse_pipeline_layout(std::string_view text, int64_t num_stages,
                                     const LayerCounts& layers);

/// Layers spread over num_stages · chunks_per_stage chunks as evenly as they go, earlier chunks
/// taking what is left over but the first, which has the embedding. Layers of multi-token
/// prediction are in the last, with the loss.
PipelineLayout even_pipeline_layout(int64_t num_stages, int64_t chunks_per_stage,
                                    const LayerCounts& layers);

/// "Et*3|t*2|t*2|mL", which parse_pipeline_layout reads.
std::string write_pipeline_layout(const PipelineLayout& layout);
/// "[E t*3] [t*2] [t*2] [m*1 L]".
std::string to_string(const PipelineLayout& layout);

}  // namespace tessera
