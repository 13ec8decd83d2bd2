#include "train/trainer/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "train/infer/generate.h"
#include "train/infer/loaded_model.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using testing::expect_same_state;
using testing::make_trainer;
using testing::TemporaryFolder;
using testing::tiny_settings;

struct ResumeCase {
  std::string name;
  void (*change)(Settings&);
};

class Resume : public ::testing::TestWithParam<ResumeCase> {};

TEST_P(Resume, ContinuesBitwise) {
  const TemporaryFolder folder;
  Settings settings = tiny_settings(folder);
  GetParam().change(settings);
  const auto whole = make_trainer(settings);
  for (int i = 0; i < 8; ++i) whole->step();

  const auto first = make_trainer(settings);
  for (int i = 0; i < 3; ++i) first->step();
  first->save("");
  const auto second = make_trainer(settings);
  ASSERT_EQ(second->position().step, 3);
  for (int i = 0; i < 5; ++i) second->step();
  EXPECT_EQ(second->position().tokens_seen, whole->position().tokens_seen);
  expect_same_state(*whole, *second);
}

INSTANTIATE_TEST_SUITE_P(
    All, Resume,
    ::testing::Values(
        ResumeCase{"f32", [](Settings&) {}},
        ResumeCase{"bf16", [](Settings& s) { s.train.precision = Precision::kBF16; }},
        ResumeCase{"bf16_moments",
                   [](Settings& s) {
                     s.optimizer.formats = {.first_moment = MomentKind::kBF16,
                                            .second_moment = MomentKind::kBF16};
                   }},
        ResumeCase{"fp8", [](Settings& s) { s.train.precision = Precision::kFp8; }},
        ResumeCase{"nvfp4",
                   [](Settings& s) {
                     s.train.precision = Precision::kFp8;
                     s.precision = {.recipe = "nvfp4", .plain = {"all@0"}};
                   }},
        ResumeCase{"remainders",
                   [](Settings& s) {
                     s.train.precision = Precision::kBF16;
                     s.optimizer.formats.master = MasterKind::kRemainder;
                   }},
        ResumeCase{"fp8_moments",
                   [](Settings& s) {
                     s.train.precision = Precision::kBF16;
                     s.optimizer.formats = {.first_moment = MomentKind::kFp8,
                                            .second_moment = MomentKind::kFp8,
                                            .master = MasterKind::kRemainder8};
                   }},
        ResumeCase{"f16_moments",
                   [](Settings& s) {
                     s.optimizer.formats = {.first_moment = MomentKind::kF16,
                                            .second_moment = MomentKind::kF16};
                   }},
        ResumeCase{"no_masters",
                   [](Settings& s) {
                     s.train.precision = Precision::kBF16;
                     s.optimizer.formats = {.first_moment = MomentKind::kBF16,
                                            .second_moment = MomentKind::kBF16,
                                            .master = MasterKind::kNone};
                   }},
        ResumeCase{"qk_clip",
                   [](Settings& s) {
                     s.train.precision = Precision::kBF16;
                     s.optimizer_kind = OptimizerKind::kMuon;
                     s.qk_clip = 0.02;
                   }},
        ResumeCase{"expert_bias", [](Settings& s) { s.model.moe.bias_update_speed = 0.01; }},
        ResumeCase{"global_balance",
                   [](Settings& s) { s.model.moe.balance_scope = BalanceTokens::kGlobalBatch; }},
        ResumeCase{"recompute", [](Settings& s) { s.train.recompute = {"all"}; }}),
    [](const auto& info) { return info.param.name; });

TEST(Trainer, MastersOfABf16RunStartFromUnroundedWeights) {
  const TemporaryFolder folder;
  const Settings settings = tiny_settings(folder);
  const auto source = make_trainer(settings);
  source->step();
  source->save("");
  Settings next = settings;
  next.run.init_from = settings.run.folder;
  next.run.folder = folder.file("next");
  next.train.precision = Precision::kBF16;
  const auto started = make_trainer(next);
  const auto& weights = source->state().parameters();
  int64_t num_masters = 0;
  started->state().optimizer().change_masters([&](const NamedSlice& master) {
    const auto expected = weights.find(master.name).weight.span<float>();
    const auto rounded = started->state().parameters().find(master.name).weight.span<Bf16>();
    const auto found = master.tensor.span<float>();
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i], expected[i]) << master.name;
      ASSERT_EQ(static_cast<float>(rounded[i]), static_cast<float>(Bf16(expected[i])));
    }
    ++num_masters;
  });
  EXPECT_GT(num_masters, 4);
}

TEST(LoadedModel, LeavesPredictionOut) {
  const TemporaryFolder folder;
  Settings settings = tiny_settings(folder);
  settings.model.mtp_layers = 1;
  const auto trainer = make_trainer(settings);
  trainer->step();
  trainer->save(make_schema(settings).to_toml());
  LoadedModel loaded(settings.run.folder, DeviceChoice::kCpu);
  const auto& trained = trainer->state().parameters();
  for (const ModelParameter& p : loaded.parameters().all()) {
    EXPECT_FALSE(is_mtp_parameter(p.spec.name)) << p.spec.name;
    const size_t bytes = p.weight.num_bytes();
    EXPECT_EQ(std::memcmp(p.weight.data, trained.find(p.spec.name).weight.data, bytes), 0);
  }
  EXPECT_EQ(std::ssize(loaded.experts()), settings.model.num_layers);
}

TEST(Trainer, TwoRunsGiveTheSameBits) {
  const TemporaryFolder folder;
  const auto a = make_trainer(tiny_settings(folder));
  const auto b = make_trainer(tiny_settings(folder));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(a->step().loss, b->step().loss);
  expect_same_state(*a, *b);
}

TEST(Trainer, LossFalls) {
  const TemporaryFolder folder;
  Settings settings = tiny_settings(folder);
  settings.train.steps = settings.schedule.num_steps = 80;
  const auto trainer = make_trainer(settings);
  const double first = trainer->step().loss;
  double last = first;
  while (trainer->position().step < 80) last = trainer->step().loss;
  EXPECT_NEAR(first, std::log(320.0), 0.3);
  EXPECT_LT(last, 0.6 * first);
  EXPECT_LT(trainer->validate(), 0.7 * first);
}

TEST(Trainer, ExpertBiasesMoveTowardsBalance) {
  const TemporaryFolder folder;
  Settings settings = tiny_settings(folder);
  settings.model.moe.bias_update_speed = 0.125;
  const auto trainer = make_trainer(settings);
  trainer->step();
  const auto loads = trainer->expert_loads();
  for (size_t layer = 0; layer < loads.size(); ++layer) {
    const auto bias = trainer->state().experts()[layer].bias.get().span<float>();
    const double mean = 4 * 16 * 2 / 4.0;
    for (size_t e = 0; e < bias.size(); ++e) {
      const auto load = static_cast<double>(loads[layer][e]);
      EXPECT_EQ(bias[e], load < mean ? 0.125F : load > mean ? -0.125F : 0.0F);
    }
  }
}

void poison(Trainer& trainer) {
  trainer.state().parameters().all().front().weight.as<float>()[0] =
      std::numeric_limits<float>::quiet_NaN();
  for (const ModelParameter& p : trainer.state().parameters().all()) {
    if (p.spec.name == "final_norm.weight")
      p.weight.as<float>()[0] = std::numeric_limits<float>::infinity();
  }
}

TEST(Trainer, StopsAtANonFiniteLossWithoutUpdating) {
  const TemporaryFolder folder;
  const auto trainer = make_trainer(tiny_settings(folder));
  poison(*trainer);
  EXPECT_THROW(trainer->step(), UserError);
  EXPECT_EQ(trainer->position().step, 0);
}

TEST(Trainer, SkipsAndCountsANonFiniteLoss) {
  const TemporaryFolder folder;
  Settings settings = tiny_settings(folder);
  settings.train.on_nonfinite = NonFinite::kSkip;
  const auto trainer = make_trainer(settings);
  const auto before =
      trainer->state().parameters().find("layers.0.attn.q.weight").weight.span<float>();
  const std::vector<float> kept(before.begin(), before.end());
  poison(*trainer);
  EXPECT_TRUE(trainer->step().skipped());
  EXPECT_EQ(trainer->position().skipped_steps, 1);
  EXPECT_EQ(trainer->position().step, 1);
  EXPECT_TRUE(std::equal(kept.begin(), kept.end(), before.begin()));
}

TEST(Trainer, PredictsItsActivationsExactly) {
  const TemporaryFolder folder;
  const auto trainer = make_trainer(tiny_settings(folder));
  const MemoryPrediction& memory = trainer->prediction();
  EXPECT_EQ(memory.state.weights,
            ParameterSet::count_bytes(list_parameters(trainer->settings().model, DType::kF32), true)
                .weights);
  EXPECT_EQ(memory.total(), memory.program + memory.state.total() + memory.activations.total());
  EXPECT_GT(memory.activations.saved, 0);
}

/// Trains a tiny model for some steps; then generation over a cache gives the log-probabilities of
/// the training's own forward pass on the same tokens.
void expect_cache_agrees(const std::function<void(ModelConfig&)>& change) {
  const TemporaryFolder folder;
  Settings settings = tiny_settings(folder);
  change(settings.model);
  settings.train.micro_batch = settings.train.global_batch = 1;
  const auto trainer = make_trainer(settings);
  for (int i = 0; i < 3; ++i) trainer->step();
  Batch batch;
  trainer->data().train->fetch(0, 0, batch);
  const ModelConfig& config = trainer->settings().model;
  ForwardModel forward(config, {.num_tokens = 16, .sequence_length = 16}, ForwardGoal::kLoss,
                       trainer->backend(), trainer->state().parameters(),
                       trainer->state().experts());
  const auto losses = forward.run_loss(view_batch(batch)).span<float>();

  KeyValueCache cache(config, DType::kF32, 16);
  const auto chunk = [&](int64_t size) {
    return ForwardModel(config, {.num_tokens = size}, ForwardGoal::kLogits, trainer->backend(),
                        trainer->state().parameters(), trainer->state().experts(), &cache);
  };
  ForwardModel prefill = chunk(5);
  ForwardModel decode = chunk(1);
  std::vector<double> log_probabilities;
  const Tensor first = prefill.run_logits(std::span(batch.tokens).first(5));
  for (int64_t i = 0; i < 5; ++i)
    log_probabilities.push_back(log_softmax(first, i)[batch.labels[i]]);
  for (size_t i = 5; i < 16; ++i) {
    log_probabilities.push_back(
        log_softmax(decode.run_logits(std::span(batch.tokens).subspan(i, 1)), 0)[batch.labels[i]]);
  }
  for (size_t i = 0; i < 16; ++i)
    EXPECT_NEAR(-log_probabilities[i], losses[i], 2e-5 * (1 + losses[i])) << i;
}

TEST(Generator, LogProbabilitiesEqualTheTrainingForward) {
  expect_cache_agrees([](ModelConfig&) {});
}

/// As gpt-oss has them.
TEST(Generator, LogProbabilitiesWithSinksWindowsAndBiases) {
  expect_cache_agrees([](ModelConfig& model) {
    model.attention_sinks = model.qkv_bias = model.output_bias = true;
    model.window = 4;
    model.window_layers = {0};
    model.activation = Activation::kSwiGLUOai;
    model.moe.mlp_bias = model.moe.router_bias = true;
    model.moe.score_order = ScoreOrder::kAfterTopK;
  });
}

/// States of Gated DeltaNet beside keys and values of gated attention.
TEST(Generator, LogProbabilitiesWithGatedDeltaNet) {
  expect_cache_agrees([](ModelConfig& model) {
    model.attention_gate = true;
    model.delta_layers = {0};
    model.delta = {.num_key_heads = 2, .num_value_heads = 4, .key_size = 6, .value_size = 5};
  });
}

/// States of Kimi Delta Attention beside latents without positions.
TEST(Generator, LogProbabilitiesWithKimiDeltaAttention) {
  expect_cache_agrees([](ModelConfig& model) {
    model.attention = AttentionKind::kLatent;
    model.num_kv_heads = 0;
    model.latent = {
        .query_rank = 0, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
    model.rope.fraction = 0;
    model.delta_layers = {0};
    model.delta = {.kind = DeltaKind::kKimi,
                   .num_key_heads = 2,
                   .num_value_heads = 2,
                   .key_size = 6,
                   .value_size = 5};
  });
}

/// States of Mamba-2 beside keys and values without positions, and layers of one part.
TEST(Generator, LogProbabilitiesWithMamba) {
  expect_cache_agrees([](ModelConfig& model) {
    model.num_layers = 3;
    model.mamba_layers = {0};
    model.layers_without_mlp = {0};
    model.layers_without_mixer = {1};
    model.rope.fraction = 0;
    model.activation = Activation::kRelu2;
    model.mamba = {.num_heads = 4, .head_size = 5, .num_groups = 2, .state_size = 6};
  });
}

/// The last inputs of a gated convolution beside keys and values, some of them not rotated.
TEST(Generator, LogProbabilitiesWithGatedConvolutionsAndTwoRotations) {
  for (const bool biased : {false, true}) {
    expect_cache_agrees([=](ModelConfig& model) {
      model.num_layers = 3;
      model.conv_layers = {0};
      model.conv = {.size = 3, .bias = biased};
      model.window = 4;
      model.window_layers = {2};
      model.own_window_rope = true;
      model.window_rope.base = 20;
      model.rope.fraction = 0;
    });
  }
}

/// As Granite and Hunyuan have them.
TEST(Generator, LogProbabilitiesWithMultipliersAndNormsOfRotatedHeads) {
  expect_cache_agrees([](ModelConfig& model) {
    model.qk_norm = QkNorm::kHead;
    model.norm_after_rotation = true;
    model.embedding_multiplier = 3;
    model.residual_multiplier = 0.4;
    model.attention_multiplier = 0.2;
    model.logits_divisor = 2;
  });
}

TEST(SampleToken, CutsByTopKAndTopP) {
  const std::vector<double> logs = {std::log(0.1), std::log(0.5), std::log(0.3), std::log(0.1)};
  Random random(1, 1);
  std::vector<int> seen(4);
  for (int i = 0; i < 400; ++i) ++seen[sample_token(logs, {.top_k = 2}, random)];
  EXPECT_EQ(seen[0] + seen[3], 0);
  EXPECT_NEAR(seen[1] / 400.0, 0.625, 0.08);
  seen.assign(4, 0);
  for (int i = 0; i < 400; ++i) ++seen[sample_token(logs, {.top_p = 0.85}, random)];
  EXPECT_EQ(seen[3], 0);
  EXPECT_GT(seen[0], 0);  // of equal probabilities the lower id comes first
  EXPECT_EQ(sample_token(logs, {.temperature = 0}, random), 1);
  EXPECT_THROW(validate(GenerateOptions{.top_p = 0}), UserError);
}

}  // namespace
}  // namespace tessera
