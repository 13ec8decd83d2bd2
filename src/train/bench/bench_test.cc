#include "train/bench/bench_layer.h"

#include <gtest/gtest.h>

#include <numeric>

#include "train/setup/loss_scales.h"
#include "train/testing/memory_check.h"

namespace tessera {
namespace {

/// A model with every loss, of two micro-batches a step.
Settings small_settings() {
  Settings settings;
  settings.run.device = DeviceChoice::kCpu;
  settings.model.vocab_size = 64;
  settings.model.hidden_size = 32;
  settings.model.num_layers = 2;
  settings.model.num_heads = 2;
  settings.model.mtp_layers = 2;
  settings.model.mtp_loss_coefficient = 0.5;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 32};
  settings.model.moe.balance_coefficient = 0.25;
  settings.model.moe.z_loss_coefficient = 0.125;
  settings.data.sequence_length = 16;
  settings.train.micro_batch = 2;
  settings.train.global_batch = 4;
  settings.schedule.num_steps = settings.train.steps;
  return settings;
}

TEST(LossScales, AreSharesOfTheGlobalBatch) {
  const LossScales scales =
      loss_scales(small_settings(), small_settings().train.num_micro_batches(), 64);
  EXPECT_FLOAT_EQ(scales.loss, 1.0F / 64);
  EXPECT_FLOAT_EQ(scales.balance, 0.25F / 2);
  EXPECT_FLOAT_EQ(scales.z_loss, 0.125F / 2);
  EXPECT_FLOAT_EQ(scales.mtp, 0.5F / 2 / 64);
  EXPECT_FLOAT_EQ(loss_scales(small_settings(), 1, 0).loss, 1.0F) << "no labels";
}

TEST(BenchStep, MemoryIsPredictedWithinThreePercent) {
  for (const char* precision : {"f32", "bf16"}) {
    testing::expect_memory_as_predicted({"--model.preset=laptop", "--model.vocab_size=512",
                                         "--run.device=cpu",
                                         fmt::format("--train.precision={}", precision)});
  }
  testing::expect_memory_as_predicted({"--model.preset=laptop", "--model.vocab_size=512",
                                       "--run.device=cpu", "--train.offload=all"});
  testing::expect_memory_as_predicted({"--model.preset=laptop", "--model.vocab_size=512",
                                       "--run.device=cpu", "--train.precision=bf16",
                                       "--lora.rank=16"});
}

TEST(StepBenchResult, MedianIsTheMiddle) {
  EXPECT_EQ((StepBenchResult{.seconds = {1}}).median(), 1);
  EXPECT_EQ((StepBenchResult{.seconds = {1, 3}}).median(), 2);
  EXPECT_EQ((StepBenchResult{.seconds = {1, 2, 9}}).median(), 2);
  EXPECT_EQ((StepBenchResult{.seconds = {1, 2, 4, 9}}).median(), 3);
}

TEST(BenchStep, TimesStepsAndOperators) {
  const StepBenchResult result =
      bench_step({.settings = small_settings(), .steps = 2, .warmup = 1});
  EXPECT_EQ(result.seconds.size(), 2);
  EXPECT_EQ(result.tokens, 64);
  for (const char* name : {"router", "router_backward", "grouped_matmul", "attention_backward"})
    EXPECT_GT(result.operators.at(name), 0) << name;
}

/// The router, experts and their gradients, as a layer has them.
TEST(BenchLayer, TimesABlockForwardAndBackward) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    Settings settings = small_settings();
    settings.train.precision = precision;
    const LayerBenchResult result = bench_layer({.settings = settings, .runs = 3, .warmup = 1});
    EXPECT_EQ(result.forward.seconds.size(), 3);
    EXPECT_GT(result.forward.operators.at("grouped_matmul"), 0);
    EXPECT_GT(result.backward.operators.at("router_backward"), 0);
    EXPECT_GT(result.backward.operators.at("grouped_matmul_wgrad"), 0);
    // Two products forward, and each again for its input and its weight. The first has gate and up.
    const double rows = 2 * 16 * 2;
    EXPECT_GT(result.forward.flops, rows * 3 * 2 * 32 * 32);
    EXPECT_LT(result.forward.flops, 1.5 * rows * 3 * 2 * 32 * 32);
    EXPECT_NEAR(result.backward.flops / result.forward.flops, 2, 0.3);
    // At least gate and up of each row.
    EXPECT_GT(result.saved_bytes,
              static_cast<double>(dtype_size(settings.train.dtype())) * rows * 2 * 32);
    EXPECT_GT(result.transient_bytes, 0);
    ASSERT_EQ(result.expert_load.size(), 4);
    EXPECT_EQ(std::accumulate(result.expert_load.begin(), result.expert_load.end(), 0.0), rows);
  }
}

TEST(BenchLayer, RoundsAsTrainingDoes) {
  Settings settings = small_settings();
  settings.train.precision = Precision::kFp8;
  for (const bool rounds : {true, false}) {
    if (!rounds) settings.precision.plain = {"moe"};
    const LayerBenchResult result = bench_layer({.settings = settings, .runs = 1, .warmup = 0});
    EXPECT_EQ(result.forward.operators.contains("round_values"), rounds);
    EXPECT_EQ(result.backward.operators.contains("round_values"), rounds);
  }
}

/// MegaScale-MoE (section 4.1) keeps of the experts gate and up alone, 2kf of 2k + 3kf.
TEST(BenchLayer, KeepsWhatThePapersFormulaKeeps) {
  Settings settings = small_settings();
  const auto saved = [&] {
    return bench_layer({.settings = settings, .runs = 1, .warmup = 0}).saved_bytes;
  };
  const int64_t row = 4 * 32;  // as wide as the hidden state, and as the inner one
  const int64_t rows = 2 * 16 * 2;
  const int64_t maps = rows * row / 2;  // the router's logits and the routing, more than they take
  settings.train.recompute = {"expert_in", "expert_act"};
  EXPECT_GE(saved(), rows * 2 * row);
  EXPECT_LE(saved(), rows * 2 * row + maps);
  settings.train.recompute = {};
  settings.model.moe.memory_efficient = false;
  EXPECT_GE(saved(), rows * 5 * row);
}

TEST(BenchLayer, TakesEveryKindOfBlock) {
  Settings settings = small_settings();
  settings.model.moe.first_dense_layers = 1;
  settings.model.moe.balance_scope = BalanceTokens::kSequence;
  for (const auto& [block, op] :
       {std::pair(LayerBlock::kAttention, "attention"), std::pair(LayerBlock::kMlp, "linear"),
        std::pair(LayerBlock::kMoe, "router")}) {
    const LayerBenchResult result =
        bench_layer({.settings = settings, .block = block, .runs = 1, .warmup = 0});
    EXPECT_GT(result.forward.operators.at(op), 0);
    EXPECT_GT(result.backward.flops, result.forward.flops);
  }
  settings.model.moe.first_dense_layers = 0;
  EXPECT_THROW(bench_layer({.settings = settings, .block = LayerBlock::kMlp}), UserError);
}

}  // namespace
}  // namespace tessera
