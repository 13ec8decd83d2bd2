#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"
#include "core/testing/case_share.h"
#include "train/setup/replica_groups.h"
#include "train/state/model_state.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

/// All kinds of matrices: of dense layers, attention, experts of different sizes, a shared expert.
Settings muon_model() {
  Settings settings;
  settings.model.vocab_size = 41;  // in unequal parts
  settings.model.hidden_size = 16;
  settings.model.num_layers = 3;
  settings.model.num_heads = 4;
  settings.model.num_kv_heads = 2;
  settings.model.inner_size = 24;
  settings.model.init_deviation = 0.2;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_sizes = {8, 12, 4, 8}};
  settings.model.moe.first_dense_layers = 1;
  settings.model.moe.shared_inner_size = 12;
  settings.data.sequence_length = 8;
  settings.train.micro_batch = 1;
  settings.train.global_batch = 4;
  settings.optimizer_kind = OptimizerKind::kMuon;
  settings.optimizer.eps = 1e-3;
  settings.schedule.peak_lr = 0.05;
  settings.schedule.kind = ScheduleKind::kConstant;
  settings.schedule.warmup_steps = 0;
  return without_data(std::move(settings));
}

struct MuonLayout {
  LayoutSpec layout;
  int64_t num_ranks;
};

const std::vector<MuonLayout>& cut_layouts() {
  static const std::vector<MuonLayout> layouts = {
      {{.tp = 2}, 2},           {{.tp = 4}, 4},  // two ranks have the same key-value head
      {{.dp = 2, .etp = 2}, 2}, {{.tp = 2, .dp = 2, .etp = 2, .ep = 2}, 4},
      {{.tp = 2, .dp = 2}, 4},  {{.tp = 4, .dp = 2, .etp = 4}, 8}};
  return layouts;
}

TEST(MuonLayouts, JoinMatricesThatTensorParallelismCuts) {
  Settings settings = muon_model();
  for (const MuonLayout& each : testing::share_of_cases(cut_layouts(), 0)) {
    settings.parallel.layout = each.layout;
    for (const ShardScope scope : {ShardScope::kNone, ShardScope::kState, ShardScope::kFull}) {
      settings.shard.scope = scope;
      settings.shard.bucket_bytes = scope == ShardScope::kState ? 2000 : 1 << 20;
      SCOPED_TRACE(fmt::format("{} ranks, tp {}, etp {}, sharding {}", each.num_ranks,
                               each.layout.tp, each.layout.etp, static_cast<int>(scope)));
      const Verification result =
          verify_layout({.settings = settings, .num_ranks = each.num_ranks});
      EXPECT_TRUE(result.agrees()) << describe(result, false);
    }
  }
}

TEST(MuonLayouts, JoinMatricesOfLatentAttention) {
  Settings settings = muon_model();
  settings.model.attention = AttentionKind::kLatent;
  settings.model.num_kv_heads = 0;
  settings.model.latent = {
      .query_rank = 8, .kv_rank = 8, .nope_size = 8, .rope_size = 4, .value_size = 8};
  settings.parallel.layout = {.tp = 2, .dp = 2};
  const Verification result = verify_layout({.settings = settings, .num_ranks = 4});
  EXPECT_TRUE(result.agrees()) << describe(result, false);
}

TEST(MuonLayouts, MemoryIsPredictedOnEveryRank) {
  Settings settings = muon_model();
  for (const MuonLayout& each : cut_layouts()) {
    settings.parallel.layout = each.layout;
    for (const ShardScope scope : {ShardScope::kState, ShardScope::kFull}) {
      settings.shard.scope = scope;
      run_thread_world(each.num_ranks, [&](World& world) {
        const RunLayout run = make_run_layout(settings, world);
        EXPECT_EQ(ModelState(settings, run, world).bytes(), ModelState::count_bytes(settings, run));
      });
    }
  }
}

/// The ranks of a node own all of the first and third part of the matrices, and halves of the
/// second.
TEST(MuonLayouts, RefuseNodesThatOwnPartsDifferently) {
  Settings settings = muon_model();
  settings.parallel.layout = {.tp = 3, .dp = 2, .dense_order = "dp-cp-tp-pp"};
  const Layout layout(settings.parallel.layout, 6);
  settings.shard.reduce_group = 3;
  EXPECT_THROW(check_sharding(settings, layout), UserError);
  settings.optimizer_kind = OptimizerKind::kAdamW;
  EXPECT_NO_THROW(check_sharding(settings, layout));
  settings.optimizer_kind = OptimizerKind::kMuon;
  settings.shard.reduce_group = 2;
  EXPECT_NO_THROW(check_sharding(settings, layout));
}

}  // namespace
}  // namespace tessera
