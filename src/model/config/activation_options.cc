#include "model/config/activation_options.h"

#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {

void add_activation_options(ConfigSchema& schema, ModelConfig& config) {
  schema.add_enum("model.activation", &config.activation,
                  {{"swiglu", Activation::kSwiGLU},
                   {"geglu", Activation::kGeGLU},
                   {"geglu_tanh", Activation::kGeGLUTanh},
                   {"swiglu_oai", Activation::kSwiGLUOai},
                   {"swiglu_clamped", Activation::kSwiGLUClamped},
                   {"gelu", Activation::kGelu},
                   {"gelu_tanh", Activation::kGeluTanh},
                   {"relu2", Activation::kRelu2}},
                  "Activation of dense layers and experts; swiglu_oai: gpt-oss's clamped SwiGLU; "
                  "swiglu_clamped: DeepSeek-V4's, silu(min(gate, L)) * up with up from -L to L, "
                  "L being model.swiglu_limit; relu2: the square of ReLU");
  schema.add("model.swiglu_limit", &config.swiglu_limit,
             "What swiglu_oai and swiglu_clamped clamp their inputs to; 0: 7 and 10, as gpt-oss "
             "and DeepSeek-V4 have them",
             between(0, kMaxMultiplier));
}

void validate_activation(const ModelConfig& config) {
  if (config.swiglu_limit == 0) return;
  require(is_clamped(config.activation),
          "model.swiglu_limit is {}, and model.activation = \"{}\" clamps nothing; leave "
          "model.swiglu_limit 0, or set model.activation to \"swiglu_clamped\" or \"swiglu_oai\"",
          config.swiglu_limit, activation_name(config.activation));
  require(config.swiglu_limit >= kMinMultiplier && config.swiglu_limit <= kMaxMultiplier,
          "model.swiglu_limit is {}; it must be 0, or from {} to {}", config.swiglu_limit,
          kMinMultiplier, kMaxMultiplier);
}

}  // namespace tessera
