#include <gtest/gtest.h>

#include <cstdlib>

#include "core/testing/case_share.h"
#include "train/testing/random_layout.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

void expect_agreement(uint64_t seed, int64_t max_ranks) {
  const testing::RandomLayout layout = testing::draw_layout(seed, max_ranks);
  const Verification result =
      verify_layout({.settings = layout.settings, .num_ranks = layout.num_ranks});
  EXPECT_TRUE(result.agrees()) << "seed " << seed << ": " << testing::describe(layout) << "\n"
                               << describe(result, false);
}

/// Gradients that travel as BF16 agree within its rounding, and are no closer than that either.
TEST(RandomLayouts, CompressedGradientsAgreeWithinTheirRounding) {
  for (uint64_t seed = 301; seed < 301 + testing::share_of_count<uint64_t>(6); ++seed) {
    const testing::RandomLayout layout = testing::draw_compressed_layout(seed, 8);
    const Verification result =
        verify_layout({.settings = layout.settings, .num_ranks = layout.num_ranks});
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    EXPECT_TRUE(result.agrees()) << describe(result, false);
    if (testing::sends_compressed(layout)) {
      EXPECT_GT(result.worst_gradient(), testing::kLeastRounding);
    }
  }
}

Settings small_settings() {
  Settings settings;
  settings.model.vocab_size = 40;
  settings.model.hidden_size = 16;
  settings.model.num_layers = 2;
  settings.model.init_deviation = 0.2;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 8};
  settings.data.sequence_length = 8;
  settings.train.micro_batch = 1;
  settings.train.global_batch = 4;
  settings.optimizer.eps = 1e-3;
  return without_data(std::move(settings));
}

void expect_agreement(const Settings& settings, int64_t num_ranks) {
  const Verification result = verify_layout({.settings = settings, .num_ranks = num_ranks});
  EXPECT_TRUE(result.agrees()) << describe(result, true);
}

/// The same on this layout, which the settings have from then on.
void expect_agreement_on(Settings& settings, const LayoutSpec& layout, int64_t num_ranks) {
  settings.parallel.layout = layout;
  SCOPED_TRACE(describe_degrees(Layout(layout, num_ranks)));
  expect_agreement(settings, num_ranks);
}

/// One balance loss over layers that are on several stages, under every order of passes.
TEST(PipelineLayouts, BalanceTheWholeModelOverStages) {
  Settings settings = small_settings();
  settings.model.num_layers = 5;
  settings.model.moe.dense_layers = {2};
  settings.model.moe.balance_coefficient = 0.5;
  settings.model.moe.balance_scope = BalanceTokens::kModel;
  settings.model.moe.balance_group_size = 2;
  settings.train.global_batch = 5;
  settings.parallel.layout.pp = 2;
  settings.parallel.layout.tp = 2;
  for (const auto schedule :
       {PipelineKind::kGpipe, PipelineKind::kOneFOneB, PipelineKind::kInterleaved}) {
    const bool interleaved = schedule == PipelineKind::kInterleaved;
    for (const bool split : {false, true}) {
      settings.parallel.schedule = schedule;
      settings.parallel.chunks_per_stage = interleaved ? 2 : 1;
      settings.parallel.split_weights = split;
      expect_agreement(settings, 4);
    }
  }
}

/// Micro-batches count for those behind them in the step, whichever rank works on which, at the
/// same time or one after the other.
TEST(AnyLayouts, BalanceTheGlobalBatch) {
  Settings settings = small_settings();
  settings.model.moe.balance_coefficient = 0.5;
  settings.model.moe.balance_scope = BalanceTokens::kGlobalBatch;
  settings.train.global_batch = 12;
  expect_agreement_on(settings, {.dp = 3}, 3);
  expect_agreement_on(settings, {.tp = 2, .dp = 2, .ep = 2}, 4);
  settings.parallel.schedule =
      PipelineKind::kGpipe;  // all forward passes before the first backward
  expect_agreement_on(settings, {.pp = 1}, 1);
  expect_agreement_on(settings, {.pp = 2}, 2);
  settings.parallel = {};
  settings.train.recompute = {"all"};
  expect_agreement_on(settings, {.cp = 2, .dp = 2, .ep = 4}, 4);
  expect_agreement_on(settings, {.pp = 2}, 2);
  settings.model.moe.balance_group_size = 2;
  expect_agreement_on(settings, {.tp = 2, .dp = 2, .pp = 2}, 8);
  settings.model.mtp_layers = 1;
  settings.model.num_layers = 4;
  settings.parallel.schedule = PipelineKind::kInterleaved;
  settings.parallel.chunks_per_stage = 2;
  expect_agreement_on(settings, {.dp = 2, .pp = 2}, 4);
}

/// Layers of multi-token prediction wherever a layout may place them: with decoder layers or
/// without, with the loss or before it, and the embedding in one stage, in several or in all.
TEST(PipelineLayouts, PredictTokensOnAnyStage) {
  Settings settings = small_settings();
  settings.model.mtp_layers = 2;
  settings.parallel.layout.pp = 3;
  settings.parallel.layout.tp = 2;
  for (const char* layout : {"Ett|mm|L", "E|ttm|mL", "Et|t|mmL", "E|ttmm|L", "Ett|m|mL"}) {
    for (const bool tied : {false, true}) {
      settings.parallel.pipeline_layout = layout;
      settings.parallel.split_weights = tied;
      settings.model.tie_embeddings = tied;
      settings.shard.scope = tied ? ShardScope::kState : ShardScope::kFull;
      SCOPED_TRACE(layout);
      expect_agreement(settings, 6);
    }
  }
}

/// The papers' layouts of DeepSeek-V3, with its kinds of layers, at a small size.
TEST(PipelineLayouts, RunThePapersLayouts) {
  Settings settings = small_settings();
  settings.model.mtp_layers = 1;
  settings.model.moe.first_dense_layers = 3;
  settings.parallel.layout.pp = 8;
  settings.parallel.schedule = PipelineKind::kInterleaved;
  settings.model.num_layers = 61;
  settings.parallel.pipeline_layout = "Et*3|(tt|)*29m|L";
  settings.train.global_batch = 2;
  expect_agreement(settings, 8);
  settings.model.num_layers = 32;
  settings.parallel.pipeline_layout = "Et*3|(tt|)*14tm|L";
  settings.parallel.layout.pp = 17;
  settings.parallel.schedule = PipelineKind::kOneFOneB;
  expect_agreement(settings, 17);
}

/// Four ranks hold each of two key-value heads twice.
TEST(TensorLayouts, NormAllHeadsOverRanks) {
  Settings settings = small_settings();
  settings.model.num_kv_heads = 2;
  settings.model.qk_norm = QkNorm::kAll;
  for (const int64_t tp : {2, 4}) {
    for (const int64_t cp : {1, 2}) {
      settings.parallel.layout.tp = tp;
      settings.parallel.layout.cp = cp;
      settings.data.sequence_length = 4 * tp * cp;
      expect_agreement(settings, tp * cp);
    }
  }
}

/// The options of gpt-oss: sinks of spread and exchanged heads, biases of spread experts.
void use_gpt_oss(ModelConfig& model) {
  model.num_layers = 3;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_size = 8;
  model.attention_sinks = model.qkv_bias = model.output_bias = true;
  model.window = 5;
  model.window_layers = {0, 2};
  model.activation = Activation::kSwiGLUOai;
  model.moe.score_order = ScoreOrder::kAfterTopK;
  model.moe.mlp_bias = model.moe.router_bias = true;
}

TEST(AnyLayouts, SpreadSinksAndBiases) {
  Settings settings = small_settings();
  use_gpt_oss(settings.model);
  settings.data.sequence_length = 16;
  expect_agreement_on(settings, {.tp = 2}, 2);
  expect_agreement_on(settings, {.tp = 4, .etp = 2}, 4);
  expect_agreement_on(settings, {.dp = 2, .ep = 2}, 2);
  expect_agreement_on(settings, {.tp = 2, .dp = 2, .etp = 2, .ep = 2, .pp = 2}, 8);
  settings.model.moe.memory_efficient = false;
  expect_agreement_on(settings, {.cp = 2, .etp = 2}, 2);
  settings.parallel.context = ContextExchange::kAllToAll;
  expect_agreement_on(settings, {.cp = 2}, 2);
  expect_agreement_on(settings, {.tp = 2, .cp = 2, .ep = 4}, 4);
  settings.parallel.attention = AttentionParallel::kUlysses;
  expect_agreement_on(settings, {.tp = 2}, 2);
  settings.model.moe.memory_efficient = true;
  settings.model.moe.experts = ExpertPath::kBlockSparse;
  settings.model.moe.inner_size = 16;
  settings.model.moe.block_size = 8;
  settings.train.recompute = {"all"};
  expect_agreement_on(settings, {.cp = 2, .dp = 2, .etp = 2, .ep = 2}, 4);
}

/// The options of Phi-3.5-MoE, whose experts are drawn alike by all layouts.
TEST(AnyLayouts, SpreadTheHeadsBiasAndDrawnExperts) {
  Settings settings = small_settings();
  ModelConfig& model = settings.model;
  model.num_layers = 3;
  model.norm = NormKind::kLayer;
  model.head_bias = model.qkv_bias = model.output_bias = true;
  model.tie_embeddings = false;
  model.moe.sparse_mixer = 0.3;
  model.moe.draw_experts = true;
  model.moe.normalize_top_k = false;
  model.moe.router_jitter = 0.1;
  model.moe.jitter_experts = true;
  settings.data.sequence_length = 16;
  expect_agreement_on(settings, {.tp = 4}, 4);
  expect_agreement_on(settings, {.tp = 2, .cp = 2, .ep = 4, .pp = 2}, 8);
  settings.shard.scope = ShardScope::kFull;
  expect_agreement_on(settings, {.tp = 2, .dp = 4, .ep = 4}, 8);
  model.tie_embeddings = true;
  model.moe.balance_scope = BalanceTokens::kModel;
  settings.train.recompute = {"all"};
  expect_agreement_on(settings, {.dp = 2, .ep = 2}, 2);
  settings.shard.scope = ShardScope::kState;
  settings.optimizer_kind = OptimizerKind::kMuon;
  model.head_bias = false;
  model.mtp_layers = 1;
  expect_agreement_on(settings, {.tp = 2, .cp = 2, .dp = 2, .ep = 2}, 8);
}

/// Documents over ranks that share sequences in every way, with all that a run may have beside it.
void expect_agreement_of_contexts(Settings settings) {
  settings.data.sequence_length = 16;
  settings.data.split_documents = true;
  expect_agreement_on(settings, {.cp = 4}, 4);
  settings.train.schedule = "merged";
  expect_agreement_on(settings, {.cp = 2, .ep = 2, .pp = 2}, 4);
  settings.train.schedule = "as_built";
  settings.parallel.context = ContextExchange::kAllToAll;
  expect_agreement_on(settings, {.tp = 2, .cp = 2, .ep = 4}, 4);
  settings.parallel.context = ContextExchange::kHierarchical;
  settings.parallel.context_inner = 2;
  settings.train.recompute = {"all"};
  settings.shard.scope = ShardScope::kFull;
  expect_agreement_on(settings, {.cp = 4, .dp = 2, .ep = 4}, 8);
}

/// Of layers that hand states from token to token.
void expect_agreement_of_states(Settings settings) {
  settings.data.sequence_length = 16;
  settings.data.split_documents = true;
  expect_agreement_on(settings, {.tp = 2}, 2);
  expect_agreement_on(settings, {.pp = 2}, 2);
  settings.train.recompute = {"all"};
  expect_agreement_on(settings, {.tp = 4, .ep = 4}, 4);
  expect_agreement_on(settings, {.tp = 2, .dp = 2, .etp = 2, .ep = 2, .pp = 2}, 8);
  settings.train.recompute.clear();
  expect_agreement_of_contexts(settings);
}

/// Layers with Gated DeltaNet, their heads spread, between layers with gated attention.
TEST(AnyLayouts, SpreadHeadsOfGatedDeltaNet) {
  Settings settings = small_settings();
  ModelConfig& model = settings.model;
  model.num_layers = 4;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_size = 8;
  model.attention_gate = true;
  model.delta_layers = {0, 1, 2};
  model.delta = {.num_key_heads = 4, .num_value_heads = 8, .key_size = 6, .value_size = 5};
  expect_agreement_of_states(settings);
}

/// Layers with gated short convolutions, their channels spread, between layers that attend.
TEST(AnyLayouts, SpreadChannelsOfGatedConvolutions) {
  Settings settings = small_settings();
  ModelConfig& model = settings.model;
  model.num_layers = 4;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_size = 8;
  model.conv_layers = {0, 1, 3};
  model.conv = {.size = 3, .bias = true};
  expect_agreement_of_states(settings);
}

/// Layers with a window rotated unlike those without, the latter not at all.
TEST(AnyLayouts, SpreadLayersOfTwoRotations) {
  Settings settings = small_settings();
  ModelConfig& model = settings.model;
  model.num_layers = 3;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_size = 8;
  model.window = 5;
  model.window_layers = {0, 2};
  model.own_window_rope = true;
  model.window_rope = {.base = 30, .fraction = 0.5};
  model.rope.fraction = 0;
  settings.data.sequence_length = 16;
  expect_agreement_on(settings, {.tp = 2, .cp = 2}, 4);
  expect_agreement_on(settings, {.pp = 3}, 3);
  settings.parallel.attention = AttentionParallel::kUlysses;
  expect_agreement_on(settings, {.cp = 2}, 2);
}

/// Layers with Mamba-2, their groups of heads spread, layers of a mixer alone and of experts alone.
TEST(AnyLayouts, SpreadGroupsOfMamba) {
  Settings settings = small_settings();
  ModelConfig& model = settings.model;
  model.num_layers = 4;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_size = 8;
  model.rope.fraction = 0;
  model.activation = Activation::kRelu2;
  model.mamba_layers = {0, 1};
  model.layers_without_mlp = {1, 2};
  model.layers_without_mixer = {3};
  model.mamba = {.num_heads = 8, .head_size = 6, .num_groups = 4, .state_size = 5};
  expect_agreement_of_states(settings);
}

/// The options of Granite and Hunyuan: multipliers at every end, norms of rotated heads.
TEST(AnyLayouts, ScaleAndNormRotatedHeads) {
  Settings settings = small_settings();
  ModelConfig& model = settings.model;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_size = 8;
  model.qk_norm = QkNorm::kHead;
  model.norm_after_rotation = true;
  model.embedding_multiplier = 3;
  model.residual_multiplier = 0.22;
  model.attention_multiplier = 0.125;
  model.logits_divisor = 6;
  model.moe.bias_update_speed = 0.01;
  settings.data.sequence_length = 16;
  expect_agreement_on(settings, {.tp = 2}, 2);
  expect_agreement_on(settings, {.cp = 2}, 2);
  expect_agreement_on(settings, {.tp = 2, .dp = 2, .etp = 2, .ep = 2, .pp = 2}, 8);
  model.qk_norm = QkNorm::kAll;
  expect_agreement_on(settings, {.tp = 4, .etp = 2}, 4);
  settings.parallel.context = ContextExchange::kAllToAll;
  settings.train.recompute = {"all"};
  expect_agreement_on(settings, {.tp = 2, .cp = 2, .ep = 4}, 4);
  settings.parallel.attention = AttentionParallel::kUlysses;
  expect_agreement_on(settings, {.tp = 2}, 2);
}

/// TESSERA_LAYOUT_SEED=n runs that case alone.
class AnyLayout : public ::testing::TestWithParam<uint64_t> {};

TEST_P(AnyLayout, GiveTheGradientsOfOneRank) {
  expect_agreement(GetParam(), 8);
}

std::vector<uint64_t> seeds(uint64_t count) {
  if (const char* one = std::getenv("TESSERA_LAYOUT_SEED"))
    return {std::strtoull(one, nullptr, 10)};
  std::vector<uint64_t> all;
  for (uint64_t seed = 1; seed <= count; ++seed) all.push_back(seed);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Seeds, AnyLayout, ::testing::ValuesIn(seeds(testing::share_of_count(10))));

}  // namespace
}  // namespace tessera
