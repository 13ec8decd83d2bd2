#include "model/config/norm_options.h"

#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {

void add_norm_options(ConfigSchema& schema, ModelConfig& config) {
  schema.add_enum("model.norm", &config.norm,
                  {{"rms", NormKind::kRms}, {"layer", NormKind::kLayer}},
                  "Norm of hidden states, before and behind a layer's parts and before the head: "
                  "RMSNorm, or LayerNorm with weight and bias, as Phi-3.5-MoE has it. Norms of "
                  "queries, keys and latents are RMSNorms in any case");
  schema.add("model.norm_eps", &config.norm_eps, "Epsilon of the norms", kEpsilonRange);
  schema.add("model.post_norms", &config.post_norms,
             "Norms also behind attention and behind MLP or experts, before their sums with the "
             "hidden states");
}

void validate_norms(const ModelConfig& config) {
  require(!config.norm_after_rotation || config.qk_norm != QkNorm::kNone,
          "model.norm_after_rotation says when queries and keys are normed, and model.qk_norm is "
          "\"none\"; set it to \"head\" or \"all\"");
  require(config.norm == NormKind::kRms || !config.mtp_normed,
          "model.mtp_normed lets layers of multi-token prediction read behind an RMSNorm of the "
          "head before, and model.norm is \"layer\"; leave one of them out");
  require(!config.head_bias || config.mtp_layers == 0,
          "model.head_bias is of one head, and model.mtp_layers {} have heads of their own; leave "
          "one of them out",
          config.mtp_layers);
}

}  // namespace tessera
