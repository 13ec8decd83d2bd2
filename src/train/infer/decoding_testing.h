#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "model/run/model_testing.h"
#include "ops/registry/cpu_kernels.h"
#include "train/infer/decoding_batch.h"

namespace tessera::testing {

/// A random model, and requests of it.
struct Rig {
  ModelConfig config = testing::tiny_config();
  DType dtype = DType::kF32;
  Backend backend;
  std::optional<ParameterSet> parameters;
  std::vector<ExpertState> experts;

  explicit Rig(DType type = DType::kF32, const std::function<void(ModelConfig&)>& change = {},
               Backend own = Backend(make_cpu_kernels()))
      : dtype(type), backend(std::move(own)) {
    if (change) change(config);
    parameters.emplace(list_parameters(config, dtype), false, backend.device());
    parameters->initialize(3);
    experts = make_expert_states(config, backend.device());
  }

  DecodingBatch batch(const DecodingLimits& limits) {
    return {config, dtype, backend, *parameters, experts, limits};
  }

  DecodingRequest request(uint64_t seed) const {
    Random random(seed, 4);
    DecodingRequest result;
    const uint64_t length = 1 + random.next_below(seed % 5 == 0 ? 160 : 20);
    for (uint64_t i = 0; i < length; ++i)
      result.prompt.push_back(
          static_cast<int32_t>(random.next_below(static_cast<uint64_t>(config.vocab_size))));
    result.options = {.max_tokens = static_cast<int64_t>(random.next_below(25)),
                      .temperature = seed % 3 == 0 ? 0 : 1.0,
                      .seed = seed};
    result.end_of_document = 5;
    result.scores_prompt = seed % 2 == 0;
    result.num_alternatives = static_cast<int64_t>(seed % 4);
    return result;
  }
};

/// Latent attention, whose pages have latents.
inline void make_latent(ModelConfig& model) {
  model.attention = AttentionKind::kLatent;
  model.latent = {
      .query_rank = 12, .kv_rank = 20, .nope_size = 8, .rope_size = 4, .value_size = 10};
}

/// The same where tokens see some keys alone, of more pages than one.
inline void make_indexed(ModelConfig& model) {
  make_latent(model);
  model.index = {.top_k = 11, .num_heads = 8, .head_size = 6};
}

/// Compressed attention, to chosen entries in one layer and to all in the other.
inline void make_compressed(ModelConfig& model) {
  model.attention = AttentionKind::kCompressed;
  model.num_kv_heads = 0;
  model.window = 9;
  model.attention_sinks = true;
  model.compressed = {.query_rank = 12,
                      .rope_size = 4,
                      .output_groups = 2,
                      .output_rank = 7,
                      .sparse_rate = 2,
                      .heavy_rate = 11,
                      .sparse_layers = {0},
                      .heavy_layers = {1}};
  model.compressed_rope = {.base = 100};
  model.index = {.top_k = 11, .num_heads = 8, .head_size = 6};
}

/// Gated DeltaNet in one layer, whose states are kept in slots.
inline void make_delta(ModelConfig& model) {
  model.delta = {
      .num_key_heads = 2, .num_value_heads = 4, .key_size = 6, .value_size = 10, .conv_size = 4};
  model.delta_layers = {0};
}

/// Kimi Delta Attention in one layer, latent attention without a rotation in the other.
inline void make_kimi(ModelConfig& model) {
  make_latent(model);
  model.rope.fraction = 0;
  model.delta = {.kind = DeltaKind::kKimi,
                 .num_key_heads = 4,
                 .num_value_heads = 4,
                 .key_size = 6,
                 .value_size = 10,
                 .conv_size = 4};
  model.delta_layers = {0};
}

/// Mamba-2 in one layer, whose states are kept in slots, and keys as values in the other.
inline void make_mamba(ModelConfig& model) {
  model.mamba = {.num_heads = 4, .head_size = 6, .num_groups = 2, .state_size = 9, .conv_size = 4};
  model.mamba_layers = {0};
  model.keys_as_values = true;
  model.value_norm = true;
  model.layer_scalars = true;
}

/// Gated short convolutions in one layer, whose last inputs are kept in slots, and a window with a
/// rotation and heads of its own in the other.
inline void make_conv(ModelConfig& model) {
  model.conv_layers = {0};
  model.conv.bias = true;
  model.window = 9;
  model.window_layers = {1};
  model.own_window_rope = true;
  model.window_rope = {.base = 50, .interleaved = true};
  model.window_heads = 2;
  model.window_kv_heads = 1;
  model.window_head_size = 6;
  model.post_norms = true;
  model.logit_softcap = 4;
  model.attention_gate = true;
  model.gate_function = AttentionGate::kSoftplusOfHeads;
  model.window_sinks = true;
  model.value_size = 5;
}

/// LayerNorms, biases also of the head, factors of rotations of long texts, SparseMixer.
inline void make_phi(ModelConfig& model) {
  model.norm = NormKind::kLayer;
  model.head_bias = model.qkv_bias = model.output_bias = true;
  model.tie_embeddings = false;
  model.window = 30;
  model.rope.scaling = RopeScaling::kLongRope;
  model.rope.factor = 4;
  model.rope.original_length = 32;
  model.rope.short_factors = std::vector<double>(model.rotary_dim() / 2, 1.0);
  for (int64_t pair = 0; pair < model.rotary_dim() / 2; ++pair)
    model.rope.long_factors.push_back(1.5 + 2.0 * static_cast<double>(pair));
  model.moe.sparse_mixer = 0.2;
  model.moe.draw_experts = true;  // in training alone
  model.moe.normalize_top_k = false;
}

/// Chunks smaller than a page, and larger than a prompt's part, in one layer; in the other no
/// rotation, but temperatures; probabilities on the experts' input.
inline void make_chunks(ModelConfig& model) {
  model.window = 21;
  model.window_kind = WindowKind::kChunked;
  model.window_layers = {0};
  model.own_window_rope = true;
  model.window_rope = {.base = 50, .interleaved = true};
  model.rope.fraction = 0;
  model.qk_norm = QkNorm::kL2;
  model.norm_after_rotation = true;
  model.temperature_scale = 0.5;
  model.temperature_length = 6;
  model.moe.probs_on_input = true;
}

/// All that a sequence came to, so that bits can be compared.
struct Written {
  std::vector<int32_t> ids;
  std::vector<double> log_probabilities;
  DecodingEnd end = DecodingEnd::kNot;
  bool operator==(const Written&) const = default;

  void take(const DecodingEvent& event) {
    const auto note = [&](const DecodedToken& token) {
      ids.push_back(token.token.id);
      log_probabilities.push_back(token.token.log_probability);
      for (const GeneratedToken& other : token.alternatives) {
        ids.push_back(other.id);
        log_probabilities.push_back(other.log_probability);
      }
    };
    for (const DecodedToken& token : event.prompt) note(token);
    if (event.token) note(*event.token);
    EXPECT_EQ(end, DecodingEnd::kNot);
    end = event.end;
  }
};

inline void run_all(DecodingBatch& batch, std::map<int64_t, Written>& written) {
  while (!batch.is_idle()) {
    const auto events = batch.step();
    ASSERT_FALSE(events.empty());
    for (const DecodingEvent& event : events) written[event.sequence].take(event);
  }
}

inline Written run_alone(Rig& rig, const DecodingRequest& request, const DecodingLimits& limits) {
  DecodingBatch batch = rig.batch(limits);
  std::map<int64_t, Written> written;
  const int64_t number = batch.add(request);
  run_all(batch, written);
  return written[number];
}

/// Both write the same tokens, many at once, with log-probabilities that are so near.
inline void expect_alike(Rig& one, Rig& other, double tolerance) {
  const DecodingLimits limits{.max_sequences = 5, .context = 200, .max_rows = 30};
  std::map<int64_t, Written> written[2];
  for (const auto& [rig, of] : {std::pair{&one, &written[0]}, {&other, &written[1]}}) {
    DecodingBatch batch = rig->batch(limits);
    for (uint64_t seed = 0; seed < 24; ++seed) {
      DecodingRequest request = rig->request(seed);
      // Of two that are almost alike either may be before the other, and drawn.
      request.num_alternatives = 0;
      request.options.temperature = 0;
      batch.add(std::move(request));
    }
    run_all(batch, *of);
  }
  for (const auto& [sequence, of] : written[0]) {
    const Written& same = written[1][sequence];
    ASSERT_EQ(of.ids, same.ids) << sequence;
    for (size_t i = 0; i < of.ids.size(); ++i)
      EXPECT_NEAR(of.log_probabilities[i], same.log_probabilities[i], tolerance);
  }
}

}  // namespace tessera::testing
