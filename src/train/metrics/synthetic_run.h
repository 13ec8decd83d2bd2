#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/random.h"
#include "train/metrics/step_record.h"

namespace tessera {

/// A made-up run for tests: falling loss, noise, drifting expert loads.
struct SyntheticRun {
  int64_t total_steps = 100;
  int64_t num_layers = 0;  ///< MoE layers; 0: a dense model
  int64_t num_experts = 8;
  int64_t dead_expert = -1;  ///< of the first MoE layer, in the second half of the run
  uint64_t seed = 1;

  StepRecord step(int64_t step) const {
    Random random(seed, static_cast<uint64_t>(step));
    const double part = static_cast<double>(step) / static_cast<double>(total_steps);
    StepRecord record;
    record.step = step;
    record.total_steps = total_steps;
    record.tokens_seen = step * 16384;
    record.loss = 4.0 + 6.4 * std::exp(-9.0 * part) + 0.08 * random.next_normal();
    record.grad_norm = 0.4 + 6.0 * std::exp(-20.0 * part) + 0.05 * std::abs(random.next_normal());
    record.clip_factor = std::min(1.0, 1.0 / record.grad_norm);
    record.learning_rate = 3e-3 * std::min(part * 20.0, 0.5 * (1.0 + std::cos(3.14159 * part)));
    record.step_seconds = 1.3 + 0.05 * std::abs(random.next_normal());
    record.tokens_per_second = 16384.0 / record.step_seconds;
    record.model_flops = 16384.0 * 6.0 * 1.1e7;
    record.utilisation = record.tflops() / 1.2;
    record.memory_predicted = 1'342'177'280;
    record.memory_used = record.memory_predicted - 12'000'000 - 400'000'000 / (step + 1);
    record.eta_seconds = record.step_seconds * static_cast<double>(total_steps - step);
    if (num_layers > 0) add_experts(random, part, record);
    return record;
  }

 private:
  void add_experts(Random& random, double part, StepRecord& record) const {
    record.balance_loss = 1.0 + 0.6 * std::exp(-8.0 * part) + 0.01 * std::abs(random.next_normal());
    record.z_loss = 0.02 + 0.3 * std::exp(-5.0 * part);
    record.dropped_tokens = 0;
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      ExpertLoad load{2 * layer + 1, {}};
      for (int64_t expert = 0; expert < num_experts; ++expert) {
        const double taste = std::sin(static_cast<double>(7 * layer + 3 * expert));
        const double factor =
            std::exp(taste * (0.25 + 1.1 * std::exp(-6.0 * part)) + 0.05 * random.next_normal());
        const bool is_dead = layer == 0 && expert == dead_expert && part > 0.5;
        load.tokens_per_expert.push_back(is_dead ? 0 : std::llround(4096.0 * factor));
      }
      record.expert_load.push_back(std::move(load));
    }
  }
};

}  // namespace tessera
