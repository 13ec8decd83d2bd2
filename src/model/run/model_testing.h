#pragma once

#include <vector>

#include "core/random.h"
#include "model/run/training_model.h"
#include "ops/registry/cpu_kernels.h"

namespace tessera::testing {

/// A configuration that runs in milliseconds.
inline ModelConfig tiny_config() {
  ModelConfig config;
  config.vocab_size = 37;
  config.hidden_size = 16;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 4;
  config.tie_embeddings = false;
  config.init_deviation = 0.3;
  config.moe.num_experts = 4;
  config.moe.top_k = 2;
  config.moe.inner_size = 8;
  return config;
}

/// Random sequences of one length, packed; some labels carry no loss.
struct TestBatch {
  std::vector<int32_t> tokens, labels, positions, cu_seqlens;
  int64_t num_valid = 0;

  TestBatch(const ModelConfig& config, int64_t num_sequences, int64_t length, uint64_t seed) {
    Random random(seed, 1);
    cu_seqlens.push_back(0);
    for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
      for (int64_t i = 0; i < length; ++i) {
        tokens.push_back(
            static_cast<int32_t>(random.next_below(static_cast<uint64_t>(config.vocab_size))));
        const bool ignored = random.next_below(8) == 0;
        labels.push_back(ignored ? -100
                                 : static_cast<int32_t>(random.next_below(
                                       static_cast<uint64_t>(config.vocab_size))));
        num_valid += ignored ? 0 : 1;
        positions.push_back(static_cast<int32_t>(i));
      }
      cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
    }
  }

  /// Makes two documents of each row of `length` tokens, the first of `first` tokens.
  void split_rows(int64_t length, int64_t first) {
    std::vector<int32_t> bounds = {0};
    for (int64_t row = 0; row < std::ssize(tokens); row += length) {
      bounds.push_back(static_cast<int32_t>(row + first));
      bounds.push_back(static_cast<int32_t>(row + length));
      for (int64_t i = first; i < length; ++i) positions[row + i] = static_cast<int32_t>(i - first);
    }
    cu_seqlens = std::move(bounds);
  }

  MicroBatch view() {
    const auto make = [](std::vector<int32_t>& ids) {
      return tessera::view(std::span(ids), {static_cast<int64_t>(ids.size())});
    };
    return {make(tokens), make(labels), make(positions), make(cu_seqlens)};
  }
};

/// Gives adapters' second matrices, which start as zeros, numbers, so that gradients reach the
/// first. Those of a weight depend on its name and an element's place in the whole weight.
inline void fill_adapters(ParameterSet& parameters, float deviation = 0.2F) {
  for (const ModelParameter& p : parameters.all()) {
    if (!p.spec.name.ends_with(".lora_b.weight")) continue;
    ParameterSpec spec = p.spec;
    spec.init_deviation = deviation;
    initialize_weight(spec, spec.placement.slice, p.weight, 7);
  }
}

/// A model with its parameters, ready to run.
struct ModelRig {
  ModelConfig config;
  ParameterSet parameters;
  std::vector<ExpertState> experts;
  TrainingModel model;

  ModelRig(const ModelConfig& config_in, const BatchShape& shape,
           const RecomputePolicy& policy = {}, uint64_t seed = 3)
      : config(config_in),
        parameters(list_parameters(config, shape.dtype), true),
        experts(make_expert_states(config)),
        model(config, shape, {.recompute = parse_recompute(policy)}, make_cpu_kernels()) {
    parameters.initialize(seed);
    fill_adapters(parameters);
    model.bind(parameters, experts);
  }

  /// Loss plus weighted balancing losses, as the optimizer sees them; gradients are added up.
  double run(TestBatch& batch, const LossScales& scales) {
    const MicroBatchResult result = model.run(batch.view(), scales);
    const auto layers = static_cast<double>(config.num_moe_layers());
    const auto of_layers = static_cast<double>(config.num_balanced_layers());
    const double balanced =
        config.moe.balance_scope == BalanceTokens::kModel ? std::min(of_layers, 1.0) : of_layers;
    return result.loss + result.mtp_loss + balanced * scales.balance * result.balance_loss +
           layers * scales.z_loss * result.z_loss;
  }
};

inline BatchShape tiny_shape(int64_t num_sequences, int64_t length, DType dtype = DType::kF32) {
  return {.num_tokens = num_sequences * length,
          .max_sequences = num_sequences,
          .sequence_length = length,
          .dtype = dtype};
}

}  // namespace tessera::testing
