#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// What one chunk of a pipeline holds of the model.
struct PipelineChunk {
  bool embedding = false;
  int64_t first_layer = 0;
  int64_t num_layers = 0;
  bool loss = false;  ///< final norm, head and loss

  bool operator==(const PipelineChunk&) const = default;
};

/// The chunks of a model in its order; chunk c belongs to stage c mod num_stages.
struct PipelineLayout {
  int64_t num_stages = 1;
  std::vector<PipelineChunk> chunks = {};

  int64_t chunks_per_stage() const { return std::ssize(chunks) / num_stages; }
};

/// Reads a layout as Megatron Core writes it (Megatron-Core MoE, section 7.5): E embedding, t a
/// decoder layer, L loss; "|" between chunks, "*n" repeats what is before it, parentheses group:
/// "Et*3|(tt|)*2L" is [E t t t] [t t] [t t] [L]. Throws UserError with the position of a mistake,
/// and where the contents are not the model's layers once, the embedding first and the loss last,
/// or the chunks no multiple of the stages. Layers of multi-token prediction (m) are refused.
PipelineLayout parse_pipeline_layout(std::string_view text, int64_t num_stages, int64_t num_layers);

/// Layers spread over num_stages · chunks_per_stage chunks as evenly as they go, earlier chunks
/// taking what is left over but the first, which has the embedding.
PipelineLayout even_pipeline_layout(int64_t num_stages, int64_t chunks_per_stage,
                                    int64_t num_layers);

/// "[E t*3] [t*2] [t*2] [L]".
std::string to_string(const PipelineLayout& layout);

}  // namespace tessera
