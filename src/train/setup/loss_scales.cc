#include "train/setup/loss_scales.h"

#include <algorithm>

namespace tessera {
namespace {

/// λ / D: what a summed loss of multi-token prediction counts, beside the model's own.
double mtp_scale(const ModelConfig& model) {
  return model.mtp_loss_coefficient / static_cast<double>(std::max<int64_t>(model.mtp_layers, 1));
}

}  // namespace

LossScales loss_scales(const Settings& settings, int64_t num_micro_batches, int64_t num_valid) {
  const MoeConfig& moe = settings.model.moe;
  const double share = 1.0 / static_cast<double>(num_micro_batches);
  const auto labels = static_cast<double>(std::max<int64_t>(num_valid, 1));
  return {.loss = 1.0F / static_cast<float>(labels),
          .balance = static_cast<float>(moe.balance_coefficient * share),
          .z_loss = static_cast<float>(moe.z_loss_coefficient * share),
          .mtp = static_cast<float>(mtp_scale(settings.model) / labels)};
}

}  // namespace tessera
