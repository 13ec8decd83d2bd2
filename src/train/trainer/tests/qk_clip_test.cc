#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"
#include "model/weights/qk_clip.h"
#include "train/state/model_state.h"
#include "train/testing/tiny_run.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// Of logits some of which exceed the limit in each step.
Settings clipped_model() {
  Settings settings;
  settings.model.vocab_size = 41;
  settings.model.hidden_size = 16;
  settings.model.num_layers = 2;
  settings.model.num_heads = 4;
  settings.model.num_kv_heads = 2;
  settings.model.qkv_bias = true;
  settings.model.init_deviation = 0.4;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 8};
  settings.data.sequence_length = 16;
  settings.train.micro_batch = 1;
  settings.train.global_batch = 4;
  settings.optimizer_kind = OptimizerKind::kMuon;
  settings.optimizer.eps = 1e-3;
  settings.schedule.peak_lr = 0.01;
  settings.schedule.kind = ScheduleKind::kConstant;
  settings.schedule.warmup_steps = 0;
  settings.qk_clip = 1.0;
  return without_data(std::move(settings));
}

ModelConfig latent_model(ModelConfig config) {
  config.attention = AttentionKind::kLatent;
  config.qkv_bias = false;
  config.num_kv_heads = 0;
  config.latent = {.query_rank = 8, .kv_rank = 8, .nope_size = 8, .rope_size = 4, .value_size = 8};
  return config;
}

struct ClipLayout {
  const char* name;
  int64_t num_ranks;
  void (*change)(Settings& settings);
};

void PrintTo(const ClipLayout& layout, std::ostream* out) {
  *out << layout.name;
}

class QkClipLayouts : public ::testing::TestWithParam<ClipLayout> {};

/// Losses, largest logits, clipped heads and weights of several steps are those of one rank.
TEST_P(QkClipLayouts, ClipAsOneRank) {
  Settings settings = clipped_model();
  GetParam().change(settings);
  const Verification result =
      verify_layout({.settings = settings, .num_ranks = GetParam().num_ranks});
  EXPECT_TRUE(result.agrees()) << describe(result, false);
  const auto clipped = std::ranges::find_if(result.scalars, [](const ScalarDifference& scalar) {
    return scalar.name == "clipped heads" && scalar.difference.reference > 0;
  });
  EXPECT_NE(clipped, result.scalars.end()) << "nothing was clipped";
}

// clang-format off
INSTANTIATE_TEST_SUITE_P(
    All, QkClipLayouts,
    ::testing::Values(
        ClipLayout{"tp", 2, [](Settings& s) { s.parallel.layout.tp = 2; }},
        ClipLayout{"tp_copies_keys", 4, [](Settings& s) { s.parallel.layout.tp = 4; }},
        ClipLayout{"tp_own_keys", 2, [](Settings& s) { s.parallel.layout.tp = 2;
                                                       s.model.num_kv_heads = 4; }},
        ClipLayout{"tp_normed", 2, [](Settings& s) { s.parallel.layout.tp = 2;
                                                     s.model.qk_norm = QkNorm::kAll; }},
        ClipLayout{"tp_latent", 4, [](Settings& s) { s.parallel.layout.tp = 2;
                                                     s.parallel.layout.dp = 2;
                                                     s.model = latent_model(s.model); }},
        ClipLayout{"ring", 2, [](Settings& s) { s.parallel.layout.cp = 2; }},
        ClipLayout{"ring_latent", 2, [](Settings& s) { s.parallel.layout.cp = 2;
                                                       s.model = latent_model(s.model); }},
        ClipLayout{"ring_window", 4, [](Settings& s) { s.parallel.layout.cp = 4;
                                                       s.model.window = 5; }},
        ClipLayout{"heads_exchanged", 2, [](Settings& s) {
          s.parallel.layout.cp = 2;
          s.parallel.context = ContextExchange::kAllToAll; }},
        ClipLayout{"hierarchical", 4, [](Settings& s) {
          s.parallel.layout.cp = 4;
          s.parallel.context = ContextExchange::kHierarchical;
          s.parallel.context_inner = 2; }},
        ClipLayout{"hybrid", 4, [](Settings& s) { s.parallel.layout.dp = 4;
                                                  s.shard.scope = ShardScope::kFull;
                                                  s.shard.group = 2; }},
        ClipLayout{"two_levels", 4, [](Settings& s) { s.parallel.layout.dp = 4;
                                                      s.shard.reduce_group = 2; }},
        ClipLayout{"ulysses", 4, [](Settings& s) {
          s.parallel.layout.tp = 2;
          s.parallel.layout.dp = 2;
          s.parallel.attention = AttentionParallel::kUlysses; }},
        ClipLayout{"tp_and_ring", 4, [](Settings& s) { s.parallel.layout.tp = 2;
                                                       s.parallel.layout.cp = 2; }},
        ClipLayout{"stages", 2, [](Settings& s) { s.parallel.layout.pp = 2; }},
        ClipLayout{"stages_prediction", 2, [](Settings& s) { s.parallel.layout.pp = 2;
                                                             s.model.mtp_layers = 1; }},
        ClipLayout{"data", 4, [](Settings& s) { s.parallel.layout.dp = 4; }},
        ClipLayout{"data_adamw", 2, [](Settings& s) {
          s.parallel.layout.dp = 2;
          s.optimizer_kind = OptimizerKind::kAdamW; }},
        ClipLayout{"data_unsharded", 2, [](Settings& s) { s.parallel.layout.dp = 2;
                                                          s.shard.scope = ShardScope::kNone; }},
        ClipLayout{"data_small_buckets", 2, [](Settings& s) {
          s.parallel.layout.dp = 2;
          s.optimizer_kind = OptimizerKind::kAdamW;  // rows are cut, not matrices
          s.shard.bucket_bytes = 600; }},
        ClipLayout{"full", 2, [](Settings& s) { s.parallel.layout.dp = 2;
                                                s.shard.scope = ShardScope::kFull; }},
        ClipLayout{"full_adamw", 3, [](Settings& s) {
          s.parallel.layout.dp = 3;
          s.train.global_batch = 6;
          s.optimizer_kind = OptimizerKind::kAdamW;
          s.shard.scope = ShardScope::kFull; }},
        ClipLayout{"full_tp", 4, [](Settings& s) { s.parallel.layout.tp = 2;
                                                   s.parallel.layout.dp = 2;
                                                   s.shard.scope = ShardScope::kFull; }},
        ClipLayout{"experts", 4, [](Settings& s) { s.parallel.layout.dp = 4;
                                                   s.parallel.layout.ep = 2; }},
        ClipLayout{"state_on_host", 2, [](Settings& s) { s.parallel.layout.dp = 2;
                                                         s.shard.state_on_host = true;
                                                         s.shard.bucket_bytes = 4096; }},
        ClipLayout{"updates_on_host", 2, [](Settings& s) {
          s.parallel.layout.dp = 2;
          s.optimizer_kind = OptimizerKind::kAdamW;
          s.shard.state_on_host = s.shard.updates_on_host = true;
          s.shard.bucket_bytes = 4096; }},
        ClipLayout{"merged", 2, [](Settings& s) { s.parallel.layout.dp = 2;
                                                  s.train.schedule = "merged"; }},
        ClipLayout{"recomputed", 2, [](Settings& s) { s.parallel.layout.tp = 2;
                                                      s.train.recompute = {"all"}; }}),
    [](const auto& info) { return std::string(info.param.name); });
// clang-format on

class QkClipRuns : public ::testing::Test {
 protected:
  Settings settings() const {
    Settings settings = testing::tiny_settings(folder_);
    settings.model.num_kv_heads = 1;
    settings.train.steps = settings.schedule.num_steps = 40;
    settings.schedule.kind = ScheduleKind::kConstant;
    settings.train.on_nonfinite = NonFinite::kStop;
    return settings;
  }

  testing::TemporaryFolder folder_;
};

struct Logits {
  double first = 0;
  double largest = 0;  ///< of the last five steps
  int64_t clipped = 0;
};

Logits train(const Settings& settings) {
  const auto trainer = testing::make_trainer(settings);
  Logits logits;
  for (int64_t step = 0; step < settings.train.steps; ++step) {
    const StepOutcome outcome = trainer->step();
    if (step == 0) logits.first = outcome.max_logit;
    if (step >= settings.train.steps - 5)
      logits.largest = std::max(logits.largest, outcome.max_logit);
    logits.clipped += outcome.clipped_heads;
  }
  return logits;
}

/// Logits that would grow to many times the limit are held at it, but for what a step adds: little
/// in the end, where the rate is small.
TEST_F(QkClipRuns, HoldLogitsAtTheLimit) {
  constexpr double kLimit = 3;
  for (const OptimizerKind kind : {OptimizerKind::kMuon, OptimizerKind::kAdamW}) {
    for (const MasterKind master :
         {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kRemainder8, MasterKind::kNone}) {
      SCOPED_TRACE(
          fmt::format("optimizer {}, master {}", static_cast<int>(kind), master_suffix(master)));
      Settings own = settings();
      own.optimizer_kind = kind;
      own.schedule.peak_lr = kind == OptimizerKind::kMuon ? 0.15 : 0.02;
      own.schedule.kind = ScheduleKind::kLinear;
      own.train.precision = Precision::kBF16;
      own.optimizer.formats.master = master;
      own.qk_clip = 1e6;  // measures, and clips nothing
      const Logits free = train(own);
      EXPECT_EQ(free.clipped, 0);
      EXPECT_GT(free.largest, 5 * kLimit);
      own.qk_clip = kLimit;
      const Logits held = train(own);
      EXPECT_LT(held.first, free.largest);
      EXPECT_GT(held.clipped, 0);
      EXPECT_LT(held.largest, 2 * kLimit);
      std::cout << fmt::format("  {:.1f} without, {:.2f} with a limit of {}; {} heads clipped\n",
                               free.largest, held.largest, kLimit, held.clipped);
    }
  }
}

/// To measure changes nothing, to the bit, nor does a limit that nothing exceeds.
TEST_F(QkClipRuns, ChangeNothingBelowTheLimit) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    Settings own = settings();
    own.train.precision = precision;
    const auto plain = testing::make_trainer(own);
    own.qk_clip = 1e6;
    const auto measured = testing::make_trainer(own);
    for (int step = 0; step < 3; ++step) {
      const StepOutcome expected = plain->step();
      const StepOutcome found = measured->step();
      EXPECT_EQ(found.loss, expected.loss);
      EXPECT_EQ(found.update.grad_norm, expected.update.grad_norm);
      EXPECT_EQ(expected.max_logit, 0);
      EXPECT_NE(found.max_logit, 0);
    }
    testing::expect_same_state(*plain, *measured);
  }
}

/// Of weights with a copy in F32 beside them these stay the copy rounded, where both were scaled.
TEST_F(QkClipRuns, ScaleMastersAndWeightsAlike) {
  Settings own = settings();
  own.train.precision = Precision::kBF16;
  own.qk_clip = 0.01;
  const auto trainer = testing::make_trainer(own);
  EXPECT_GT(trainer->step().clipped_heads, 0);
  int64_t num_masters = 0;
  trainer->state().optimizer().change_masters([&](const NamedSlice& master) {
    const auto weights = trainer->state().parameters().find(master.name).weight.span<Bf16>();
    const auto masters = master.tensor.span<float>();
    for (size_t i = 0; i < masters.size(); ++i)
      ASSERT_EQ(weights[i].bits, Bf16(masters[i]).bits) << master.name;
    ++num_masters;
  });
  EXPECT_GT(num_masters, 4);
}

/// A limit below each step's logits scales the rows that it should by what it should.
TEST_F(QkClipRuns, ScaleTheRowsOfClippedHeads) {
  Settings own = settings();
  own.schedule.warmup_steps = 0;
  own.qk_clip = 1e6;
  const auto plain = testing::make_trainer(own);
  plain->step();
  own.qk_clip = 0.01;
  const auto clipped = testing::make_trainer(own);
  const StepOutcome outcome = clipped->step();
  ASSERT_GT(outcome.clipped_heads, 0);
  ASSERT_GT(outcome.max_logit, own.qk_clip);
  const double largest_factor = own.qk_clip / outcome.max_logit;
  double least_ratio = 1;
  for (const ModelParameter& p : plain->state().parameters().all()) {
    const auto before = p.weight.span<float>();
    const auto after = clipped->state().parameters().find(p.spec.name).weight.span<float>();
    for (size_t i = 0; i < before.size(); ++i) {
      if (after[i] == before[i]) continue;
      EXPECT_NE(p.spec.name.find("attn.q.weight"), std::string::npos) << p.spec.name;
      least_ratio = std::min<double>(least_ratio, after[i] / before[i]);
    }
  }
  EXPECT_NEAR(least_ratio, largest_factor, 1e-4 * largest_factor);
}

TEST_F(QkClipRuns, StateInTheHostsMemoryGivesTheSameBits) {
  Settings own = settings();
  own.train.precision = Precision::kBF16;
  own.optimizer.formats.master = MasterKind::kRemainder;
  own.shard.bucket_bytes = 1 << 14;
  own.qk_clip = 0.05;
  const auto plain = testing::make_trainer(own);
  own.shard.state_on_host = true;
  const auto streamed = testing::make_trainer(own);
  own.shard.updates_on_host = true;
  const auto updated = testing::make_trainer(own);
  int64_t clipped = 0;
  for (int step = 0; step < 3; ++step) {
    const StepOutcome expected = plain->step();
    EXPECT_EQ(streamed->step().loss, expected.loss);
    EXPECT_EQ(updated->step().loss, expected.loss);
    clipped += expected.clipped_heads;
  }
  EXPECT_GT(clipped, 0);
  testing::expect_same_state(*plain, *streamed);
  testing::expect_same_state(*plain, *updated);
}

TEST_F(QkClipRuns, ASkippedStepClipsNothing) {
  Settings own = settings();
  own.qk_clip = 0.01;
  own.train.on_nonfinite = NonFinite::kSkip;
  const auto trainer = testing::make_trainer(own);
  trainer->step();
  const Tensor embedding = trainer->state().parameters().find("embedding.weight").weight;
  std::ranges::fill(embedding.span<float>(), NAN);
  const Tensor queries = trainer->state().parameters().find("layers.0.attn.q.weight").weight;
  const std::vector<float> before(queries.as<float>(),
                                  queries.as<float>() + queries.num_elements());
  const StepOutcome outcome = trainer->step();
  EXPECT_TRUE(outcome.skipped());
  EXPECT_EQ(outcome.clipped_heads, 0);
  EXPECT_TRUE(std::ranges::equal(queries.span<float>(), before));
}

TEST(QkClipSettings, RefuseWhatItCannotClip) {
  Settings settings = clipped_model();
  settings.data.tokens = "tokens";
  settings.schedule.num_steps = settings.train.steps;
  EXPECT_NO_THROW(validate(settings));
  settings.model.qk_norm = QkNorm::kHead;
  EXPECT_THAT([&] { validate(settings); }, ThrowsMessage<UserError>(HasSubstr("changes no logit")));
  settings.model.qk_norm = QkNorm::kL2;
  EXPECT_THAT([&] { validate(settings); }, ThrowsMessage<UserError>(HasSubstr("is \"l2\"")));
  settings.qk_clip = 0;
  EXPECT_NO_THROW(validate(settings));
  settings.model.qk_norm = QkNorm::kNone;
  settings.qk_clip = 1;
  settings.shard.release_gradients = true;
  settings.train.max_grad_norm = 0;
  EXPECT_THAT([&] { validate(settings); },
              ThrowsMessage<UserError>(HasSubstr("optim.release_gradients")));
}

}  // namespace
}  // namespace tessera
