#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/testing/case_share.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/tiny_run.h"
#include "train/verify/verify.h"
#include "train/verify/verify_static.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Rows of 24 tokens, in which documents of up to that many are as they come.
Settings small_settings() {
  Settings settings;
  settings.model.vocab_size = 40;
  settings.model.hidden_size = 16;
  settings.model.num_layers = 2;
  settings.model.init_deviation = 0.2;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 8};
  settings.model.moe.balance_coefficient = 0.5;
  settings.model.moe.z_loss_coefficient = 0.1;
  settings.model.moe.balance_scope = BalanceTokens::kSequence;
  settings.data.sequence_length = 24;
  settings.data.split_documents = true;
  settings.train.micro_batch = 1;
  settings.train.global_batch = 8;
  settings.optimizer.eps = 1e-3;
  settings.parallel.dynamic_cp = true;
  return without_data(std::move(settings));
}

void expect_agreement(const Settings& settings, int64_t num_ranks) {
  const Verification result = verify_layout({.settings = settings, .num_ranks = num_ranks});
  EXPECT_TRUE(result.agrees()) << describe(result, true);
  const StaticVerification proof = verify_static(settings, num_ranks);
  EXPECT_TRUE(proof.agrees()) << describe(proof, false);
}

void expect_agreement_on(Settings settings, const LayoutSpec& layout, int64_t num_ranks) {
  settings.parallel.layout = layout;
  SCOPED_TRACE(describe_degrees(Layout(layout, num_ranks)));
  expect_agreement(settings, num_ranks);
}

TEST(DynamicContexts, GiveTheGradientsOfOneRank) {
  for (const Packing packing : {Packing::kStream, Packing::kBestFit}) {
    Settings settings = small_settings();
    settings.data.packing = packing;
    expect_agreement_on(settings, {.cp = 2}, 2);
    expect_agreement_on(settings, {.dp = 2}, 2);
    expect_agreement_on(settings, {.cp = 4, .ep = 4}, 4);
    expect_agreement_on(settings, {.cp = 2, .dp = 2, .ep = 2}, 4);
    expect_agreement_on(settings, {.tp = 2, .cp = 2, .dp = 2, .ep = 4}, 8);
    settings.train.micro_batch = 2;
    expect_agreement_on(settings, {.cp = 3, .dp = 2}, 6);
    expect_agreement_on(settings, {.dp = 4, .ep = 2}, 4);
  }
}

TEST(DynamicContexts, GoWithShardingAndRecomputation) {
  Settings settings = small_settings();
  settings.train.recompute = {"all"};
  settings.shard.scope = ShardScope::kFull;
  expect_agreement_on(settings, {.cp = 2, .dp = 2, .ep = 2}, 4);
  settings.shard.scope = ShardScope::kNone;
  settings.model.moe.bias_update_speed = 0.01;
  settings.model.mtp_layers = 2;
  settings.model.attention_sinks = true;
  expect_agreement_on(settings, {.cp = 4, .dp = 2, .ep = 4}, 8);
}

TEST(DynamicContexts, GoWithWindowsAndDenseModels) {
  Settings settings = small_settings();
  settings.model.moe.num_experts = 0;
  settings.model.window = 5;
  settings.model.window_layers = {1};
  expect_agreement_on(settings, {.tp = 2, .cp = 2}, 4);
  expect_agreement_on(settings, {.cp = 4, .dp = 2}, 8);
}

TEST(DynamicContexts, RandomLayoutsAgree) {
  for (uint64_t seed = 901; seed < 901 + testing::share_of_count<uint64_t>(16); ++seed) {
    const testing::RandomLayout layout = testing::draw_context_layout(seed, 8);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    expect_agreement(layout.settings, layout.num_ranks);
  }
}

/// Which documents share a micro-batch changes nothing: rows without padding, in their own order.
TEST(DynamicContexts, ComputeWhatPlainRowsDo) {
  const testing::TemporaryFolder folder;
  Settings settings = small_settings();
  settings.data.tokens = folder.file("tokens");
  settings.run.folder = folder.file("run");
  settings.run.device = DeviceChoice::kCpu;
  settings.train.steps = settings.schedule.num_steps = 2;
  testing::write_tokens(settings);
  std::vector<std::string> names;
  for (const ParameterSpec& spec : list_parameters(settings.model, DType::kF32))
    names.push_back(spec.name);
  settings.parallel.layout.cp = 4;
  const RunRecord dynamic = record_run(settings, 4, 2);
  settings.parallel = {};
  const RunRecord plain = record_run(settings, 1, 2);
  const Verification result = compare_runs(dynamic, plain, names, {});
  EXPECT_TRUE(result.agrees()) << describe(result, true);
}

std::string refusal_of(const std::function<void(Settings&)>& change, int64_t num_ranks = 2) {
  Settings settings = small_settings();
  settings.parallel.layout.cp = 2;
  settings.train.steps = settings.schedule.num_steps = 1;
  change(settings);
  try {
    check_as_training(settings, num_ranks);
  } catch (const UserError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(DynamicContexts, RefuseWhatTheyDoNotGoWith) {
  EXPECT_EQ(refusal_of([](Settings&) {}), "accepted");
  const std::pair<const char*, std::function<void(Settings&)>> cases[] = {
      {"data.split_documents = false", [](Settings& s) { s.data.split_documents = false; }},
      {"parallel.context other",
       [](Settings& s) { s.parallel.context = ContextExchange::kAllToAll; }},
      {"parallel.attention = \"ulysses\"",
       [](Settings& s) { s.parallel.attention = AttentionParallel::kUlysses; }},
      {"parallel.pp 2", [](Settings& s) { s.parallel.layout.pp = 2; }},
      {"\"gpipe\"", [](Settings& s) { s.parallel.schedule = PipelineKind::kGpipe; }},
      {"moe.balance_scope",
       [](Settings& s) { s.model.moe.balance_scope = BalanceTokens::kMicroBatch; }},
      {"moe.capacity_factor", [](Settings& s) { s.model.moe.capacity_factor = 1; }},
      {"train.schedule = \"merged\"", [](Settings& s) { s.train.schedule = "merged"; }},
      {"train.precision = \"fp8\"", [](Settings& s) { s.train.precision = Precision::kFp8; }},
      {"optim.qk_clip", [](Settings& s) { s.qk_clip = 10; }},
      {"put dp right behind cp",
       [](Settings& s) { s.parallel.layout.dense_order = "tp-dp-cp-pp"; }},
      {"a multiple of 4", [](Settings& s) { s.data.sequence_length = 22; }},
      {"moe.draw_experts",
       [](Settings& s) {
         s.model.moe.sparse_mixer = 0.1;
         s.model.moe.draw_experts = true;
         s.model.moe.normalize_top_k = false;
       }},
  };
  for (const auto& [what, change] : cases) EXPECT_THAT(refusal_of(change), HasSubstr(what));
  EXPECT_THAT(refusal_of([](Settings& s) { s.parallel.layout.cp = 3; }, 3),
              HasSubstr("the most ranks that may share one are 1"));
}

/// Stopped in the middle, a run goes on with the bits of an unbroken one.
TEST(DynamicContexts, ContinueToTheBit) {
  const testing::TemporaryFolder folder;
  Settings settings = small_settings();
  settings.data.tokens = folder.file("tokens");
  settings.run.folder = folder.file("whole");
  settings.run.device = DeviceChoice::kCpu;
  settings.run.resume = ResumeMode::kAuto;
  settings.train.steps = settings.schedule.num_steps = 6;
  testing::write_tokens(settings);
  testing::NamedLayout layout{.name = "dynamic", .num_ranks = 4};
  layout.parallel.layout = {.cp = 2, .dp = 2, .ep = 2};
  layout.parallel.dynamic_cp = true;
  const testing::RunEnd whole = testing::run_steps(settings, layout, 6, false);
  settings.run.folder = folder.file("parts");
  testing::run_steps(settings, layout, 3, true);
  const testing::RunEnd rest = testing::run_steps(settings, layout, 6, false);
  EXPECT_EQ(rest.weights, whole.weights);
  ASSERT_EQ(rest.losses.size(), 3U);
  EXPECT_TRUE(std::equal(rest.losses.begin(), rest.losses.end(), whole.losses.begin() + 3));
}

}  // namespace
}  // namespace tessera
