#include "model/config/residual_options.h"

#include "core/error.h"
#include "model/config/limits.h"
#include "ops/stream_weights/stream_rule.h"

namespace tessera {

void add_residual_options(ConfigSchema& schema, ModelConfig& config) {
  schema.add("model.residual_streams", &config.residual_streams,
             "Streams of the hidden states, which mixer and MLP read, join and mix by weights that "
             "each token gives itself (manifold-constrained hyper-connections, as in DeepSeek-V4); "
             "1: they add to one",
             between(1, kMaxStreams));
  schema.add("model.residual_sinkhorn_iterations", &config.residual_sinkhorn_iterations,
             "Steps of Sinkhorn's iteration that make the mixing all but doubly stochastic",
             between(1, kMaxSinkhornIterations));
  schema.add("model.residual_eps", &config.residual_eps,
             "Epsilon of the streams' weights and of that iteration",
             {.min = 0, .max = 1, .min_open = true});
}

void validate_residual(const ModelConfig& config) {
  require(!config.has_streams() || config.mtp_layers == 0 || !config.mtp_normed,
          "model.mtp_normed has layers of multi-token prediction read what the head's norm gives, "
          "and with model.residual_streams {} they read the streams before it; leave "
          "model.mtp_normed out",
          config.residual_streams);
  require(!config.has_streams() || config.mtp_layers == 0 || config.norm == NormKind::kRms,
          "model.norm is a LayerNorm, and layers of multi-token prediction norm each of "
          "model.residual_streams {} by RMSNorm alone; set model.mtp_layers to 0, or model.norm to "
          "\"rms\"",
          config.residual_streams);
}

}  // namespace tessera
