#include "train/testing/layout_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "comm/thread/thread_world.h"
#include "core/random.h"
#include "data/token_file_writer.h"
#include "train/run/run_record.h"
#include "train/trainer/trainer.h"
#include "train/verify/verify.h"

namespace tessera::testing {
namespace {

ParallelSpec degrees(int64_t tp, int64_t cp, int64_t dp, int64_t pp, int64_t ep, int64_t etp) {
  ParallelSpec parallel;
  parallel.layout.tp = tp;
  parallel.layout.cp = cp;
  parallel.layout.dp = dp;
  parallel.layout.pp = pp;
  parallel.layout.ep = ep;
  parallel.layout.etp = etp;
  return parallel;
}

}  // namespace

void write_tokens(const Settings& settings) {
  if (std::filesystem::exists(settings.data.tokens + ".idx")) return;
  TokenFileWriter writer(settings.data.tokens, settings.model.vocab_size);
  Random random(3, 3);
  for (int document = 0; document < 40; ++document) {
    std::vector<int32_t> tokens(10 + random.next_below(30));
    for (int32_t& token : tokens)
      token =
          static_cast<int32_t>(random.next_below(static_cast<uint64_t>(settings.model.vocab_size)));
    writer.append(tokens);
    writer.end_document();
  }
  writer.finish();
}

std::vector<NamedLayout> layouts_for_checkpoints() {
  std::vector<NamedLayout> layouts = {
      {"one", 1, degrees(1, 1, 1, 1, 1, 1)},       {"tp2", 2, degrees(2, 1, 1, 1, 1, 1)},
      {"cp2", 2, degrees(1, 2, 1, 1, 1, 1)},       {"dp3", 3, degrees(1, 1, 3, 1, 1, 1)},
      {"pp2", 2, degrees(1, 1, 1, 2, 1, 1)},       {"ep2", 2, degrees(1, 1, 2, 1, 2, 1)},
      {"etp2", 2, degrees(2, 1, 1, 1, 1, 2)},      {"folded", 8, degrees(2, 2, 1, 2, 4, 1)},
      {"tp2dp2ep2", 4, degrees(2, 1, 2, 1, 2, 2)}, {"unsharded", 2, degrees(1, 1, 2, 1, 1, 1)},
      {"ulysses", 4, degrees(2, 1, 2, 1, 4, 1)},   {"pp2dp3", 6, degrees(1, 1, 3, 2, 1, 1)},
      {"full", 6, degrees(2, 1, 3, 1, 2, 1)},      {"pp2full", 6, degrees(1, 1, 3, 2, 1, 1)},
      {"hybrid", 6, degrees(1, 1, 6, 1, 1, 1)}};
  layouts[9].shard.scope = ShardScope::kNone;
  layouts[10].parallel.attention = AttentionParallel::kUlysses;
  layouts[11].shard.reduce_group = 3;
  layouts[12].shard.scope = ShardScope::kFull;
  layouts[13].shard.scope = ShardScope::kFull;
  layouts[14].shard = {.scope = ShardScope::kFull, .group = 2};
  return layouts;
}

Settings settings_for_layouts(const std::filesystem::path& folder) {
  Settings settings;
  ModelConfig& model = settings.model;
  model.vocab_size = 41;
  model.hidden_size = 16;
  model.num_layers = 2;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_size = 4;
  model.inner_size = 12;
  model.init_deviation = 0.2;
  model.mtp_layers = 1;
  model.moe = {.num_experts = 4,
               .top_k = 2,
               .inner_size = 8,
               .bias_update_speed = 0.01,
               .shared_inner_size = 6};
  settings.data.sequence_length = 16;
  settings.train.micro_batch = 1;
  settings.train.global_batch = 6;
  settings.train.steps = 4;
  settings = without_data(std::move(settings));
  settings.run.device = DeviceChoice::kCpu;  // the tests read its memory
  settings.optimizer.eps = 1e-3;
  settings.schedule = {.kind = ScheduleKind::kConstant, .peak_lr = 1e-2, .num_steps = 4};
  settings.run.resume = ResumeMode::kAuto;
  settings.data.tokens = (folder / "tokens").string();
  write_tokens(settings);
  return settings;
}

std::vector<float> list_roundings(const RoundingHistory& history) {
  std::vector<float> all;
  for (const RoundingHistory::Layer& layer : history.layers()) {
    const auto amax = layer.amax.get().span<float>();
    all.insert(all.end(), amax.begin(), amax.end());
  }
  return all;
}

std::vector<float> run_ranks(Settings settings, const NamedLayout& layout,
                             const DeviceChooser& choose,
                             const std::function<void(Trainer&, int64_t rank)>& use) {
  settings.parallel = layout.parallel;
  settings.shard = layout.shard;
  WholeTensors whole;
  std::mutex mutex;
  run_thread_world(layout.num_ranks, [&](World& world) {
    Settings own = settings;
    TrainingData data = open_training_data(own);
    Trainer trainer(own, std::move(data), world, choose);
    trainer.resume("");
    use(trainer, world.rank());
    trainer.state().wait_weights();
    const std::scoped_lock lock(mutex);
    gather_parts(trainer.state().owned_model(), whole);
  });
  std::vector<float> weights;
  for (const auto& [name, tensor] : whole)
    weights.insert(weights.end(), tensor.values.begin(), tensor.values.end());
  return weights;
}

RunEnd run_steps(Settings settings, const NamedLayout& layout, int64_t steps, bool save,
                 const DeviceChooser& choose) {
  RunEnd end;
  std::mutex mutex;
  end.weights = run_ranks(std::move(settings), layout, choose, [&](Trainer& trainer, int64_t rank) {
    while (trainer.position().step < steps) {
      const double loss = trainer.step().loss;
      if (rank == 0) end.losses.push_back(loss);
    }
    if (save) trainer.save("");
    const std::vector<float> roundings = list_roundings(trainer.state().roundings());
    const std::scoped_lock lock(mutex);
    if (end.roundings.empty()) end.roundings = roundings;
    EXPECT_EQ(end.roundings, roundings) << "rank " << rank;
  });
  return end;
}

void expect_same_end(const RunEnd& found, const RunEnd& expected) {
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.weights, expected.weights);
  EXPECT_EQ(found.roundings, expected.roundings);
}

}  // namespace tessera::testing
