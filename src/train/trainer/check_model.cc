#include "train/trainer/check_model.h"

#include "train/memory/choose_policy.h"
#include "train/memory/memory_limit.h"
#include "train/memory/memory_prediction.h"
#include "train/memory/planned_rank.h"
#include "train/setup/device_choice.h"
#include "train/setup/device_overhead.h"
#include "train/setup/machine.h"
#include "train/setup/size_check.h"
#include "train/setup/training_data.h"

namespace tessera {
namespace {

/// Of a rank's batches of a step: token ids, labels and positions.
int64_t batch_bytes(const Settings& settings, const RunLayout& layout) {
  constexpr int64_t kBytesOfToken = 12;
  int64_t tokens = batch_shape(settings).num_tokens;
  // At most all ranks of cp and dp share a micro-batch.
  if (settings.parallel.dynamic_cp) tokens *= layout.layout.degree(Axis::kDp);
  return layout.num_micro_batches * tokens * kBytesOfToken;
}

}  // namespace

void check_model(Settings settings, int64_t num_ranks, FitCheck fit) {
  settings.model.vocab_size = resolve_vocab_size(settings.model.vocab_size,
                                                 *make_tokenizer(settings.data.tokenizer_spec()));
  check_sized_model(settings, num_ranks, fit);
}

void check_sized_model(Settings settings, int64_t num_ranks, FitCheck fit) {
  check_device(settings, num_ranks);
  validate(settings.model);
  if (fit == FitCheck::kNone) {
    plan_rank(settings, 0, num_ranks);
    return;
  }
  if (given_limit(settings.train)) {
    const Backend backend = plan_backend(settings, num_ranks);
    apply(*plan_policy(settings, num_ranks, backend, batch_shape(settings)), settings.train);
  }
  const PlannedRank rank = plan_rank(settings, 0, num_ranks);
  const Device& device = rank.model.device();
  const auto state = ModelState::count_bytes(settings, rank.layout, rank.backend);
  const ActivationBytes activations = rank.model.activation_bytes();
  if (device.is_host()) {
    return require_host_memory(state.total() + state.on_host + activations.total() +
                                   activations.offloaded + batch_bytes(settings, rank.layout),
                               machine_memory(), "training");
  }
  require_pinnable(activations.offloaded + state.on_host, machine_memory());
  const MemoryPrediction prediction{
      .state = state,
      .activations = activations,
      .overhead = predict_overhead(settings, rank.layout, rank.model, rank.backend),
      .on_host = false};
  if (!chooses_for_device(settings.train, rank.backend))
    return require_memory(prediction, device.name(), gpu_memory());
  // Of several ranks each would choose for all; the trainers do that once.
  if (num_ranks == 1 && prediction.total() > gpu_memory())
    plan_policy(settings, num_ranks, rank.backend, batch_shape(settings));
}

}  // namespace tessera
