#include "model/config/mamba_options.h"

#include <algorithm>

#include "core/error.h"
#include "model/config/limits.h"
#include "ops/short_conv/short_conv.h"

namespace tessera {
namespace {

struct LayerList {
  const char* key;
  const std::vector<int64_t>* layers;
};

/// Refuses two lists that say different things of one layer.
void check_apart(const LayerList& a, const LayerList& b, const char* why) {
  for (const int64_t layer : *a.layers) {
    require(std::ranges::find(*b.layers, layer) == b.layers->end(),
            "{} and {} both list layer {}; {}", a.key, b.key, layer, why);
  }
}

}  // namespace

void add_mamba_options(ConfigSchema& schema, MambaConfig& mamba) {
  schema.add("mamba.num_heads", &mamba.num_heads, "Heads of Mamba-2 layers", between(1, kMaxHeads));
  schema.add("mamba.head_size", &mamba.head_size, "Size of a head", between(1, kMaxWidth));
  schema.add("mamba.num_groups", &mamba.num_groups,
             "Groups of heads that have B and C in common; it divides the heads",
             between(1, kMaxHeads));
  schema.add("mamba.state_size", &mamba.state_size, "Numbers that a head's element keeps",
             between(1, kMaxWidth));
  schema.add("mamba.conv_size", &mamba.conv_size, "Tokens of the short convolution of x, B and C",
             between(1, ShortConv::kMaxTaps));
  schema.add("mamba.conv_bias", &mamba.conv_bias, "Biases of that convolution");
  schema.add("mamba.proj_bias", &mamba.proj_bias,
             "Biases of the projections into the mixer and out of it");
  schema.add("mamba.min_step", &mamba.min_step,
             "Least step of a token, to which smaller ones are raised", at_least(0));
  schema.add("mamba.max_step", &mamba.max_step,
             "Largest step, to which larger ones are lowered; 0: without limit", at_least(0));
}

void validate_mixers(const ModelConfig& config) {
  const LayerList mamba{"model.mamba_layers", &config.mamba_layers};
  const LayerList delta{"model.delta_layers", &config.delta_layers};
  const LayerList conv{"model.conv_layers", &config.conv_layers};
  const LayerList without_mixer{"model.layers_without_mixer", &config.layers_without_mixer};
  const LayerList without_mlp{"model.layers_without_mlp", &config.layers_without_mlp};
  const LayerList window{"model.window_layers", &config.window_layers};
  constexpr const char* kOneMixer = "a layer has one mixer at most";
  check_apart(delta, mamba, kOneMixer);
  check_apart(delta, conv, kOneMixer);
  check_apart(mamba, conv, kOneMixer);
  check_apart(without_mixer, delta, kOneMixer);
  check_apart(without_mixer, conv, kOneMixer);
  check_apart(without_mixer, mamba, kOneMixer);
  check_apart(without_mixer, without_mlp, "a layer needs a mixer or an MLP");
  check_apart(window, mamba, "only attention has a window");
  check_apart(window, conv, "only attention has a window");
  check_apart(window, without_mixer, "only attention has a window");
  const int64_t last = config.num_layers - 1;
  require(config.mtp_layers == 0 || (config.has_mixer(last) && config.has_mlp(last)),
          "model.mtp_layers {} makes layers like the last one, and layer {} has no {}; leave "
          "model.mtp_layers out, or give it both",
          config.mtp_layers, last, config.has_mixer(last) ? "MLP" : "mixer");
  if (config.mamba_layers.empty()) return;
  const MambaConfig& sizes = config.mamba;
  require(sizes.num_heads % sizes.num_groups == 0,
          "mamba.num_heads {} is not a multiple of mamba.num_groups {}", sizes.num_heads,
          sizes.num_groups);
  require(sizes.max_step == 0 || sizes.max_step >= sizes.min_step,
          "mamba.max_step {} is below mamba.min_step {}", sizes.max_step, sizes.min_step);
}

}  // namespace tessera
