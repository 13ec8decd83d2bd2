#include "train/run/step_recorder.h"

#include <algorithm>

#include "core/process/stopwatch.h"
#include "train/trainer/step_tallies.h"

namespace tessera {

void StepRecorder::begin() {
  started_ = std::chrono::steady_clock::now();
  first_step_ = trainer_.position().step;
}

StepRecord StepRecorder::record(const StepOutcome& outcome, double seconds) {
  const Settings& settings = trainer_.settings();
  const RunPosition& position = trainer_.position();
  sample_memory();
  StepRecord record{
      .step = position.step,
      .total_steps = settings.train.steps,
      .tokens_seen = position.tokens_seen,
      .loss = outcome.loss,
      .grad_norm = outcome.update.grad_norm,
      .learning_rate = learning_rate(settings.schedule, position.step - 1),
      .clip_factor = outcome.update.clip_factor,
      .step_seconds = seconds,
      .tokens_per_second = static_cast<double>(outcome.num_tokens) / seconds,
      .model_flops = trainer_.step_flops(),
      .utilisation = peak_.share_of(trainer_.step_flops() / seconds /
                                    static_cast<double>(trainer_.layout().num_ranks())),
      .memory_used = most_memory_,
      .memory_predicted = trainer_.prediction().total() + most_unbalanced_,
      .dropped_tokens = outcome.dropped,
      .skipped_steps = position.skipped_steps};
  const double mean_seconds =
      seconds_since(started_) / static_cast<double>(position.step - first_step_);
  record.eta_seconds = mean_seconds * static_cast<double>(settings.train.steps - position.step);
  if (settings.model.mtp_layers > 0) record.mtp_loss = outcome.mtp_loss;
  if (settings.qk_clip > 0) {
    record.max_logit = outcome.max_logit;
    record.clipped_heads = outcome.clipped_heads;
  }
  if (trainer_.loss_scale()) record.loss_scale = outcome.loss_scale;
  if (settings.train.stashes()) record.repeated_steps = trainer_.num_repeats();
  add_experts(outcome, record);
  add_roundings(outcome.roundings, record);
  return record;
}

void StepRecorder::sample_memory() {
  const Device& device = trainer_.backend().device();
  const int64_t used = device.is_host() ? host_peak_.sample() : device.used_bytes();
  most_memory_ = std::max(most_memory_, used);
  most_unbalanced_ = std::max(most_unbalanced_, trainer_.unbalanced_bytes());
}

void StepRecorder::add_experts(const StepOutcome& outcome, StepRecord& record) const {
  const ModelConfig& model = trainer_.settings().model;
  if (model.num_moe_layers() == 0) return;
  record.balance_loss = outcome.balance_loss;
  if (model.moe.z_loss_coefficient > 0) record.z_loss = outcome.z_loss;
  record.expert_load = expert_loads();
}

std::vector<ExpertLoad> StepRecorder::expert_loads() const {
  return loads_by_layer(trainer_.expert_loads(), trainer_.settings().model);
}

}  // namespace tessera
