// Runs whose rows wait in pages of a stash, beside runs with memory for the worst routing.
#include <gmock/gmock.h>

#include <algorithm>
#include <mutex>

#include "core/host_tensor.h"
#include "core/testing/case_share.h"
#include "core/testing/host_like_device.h"
#include "ops/registry/cpu_kernels.h"
#include "step/check_plan.h"
#include "step/step_memory.h"
#include "train/memory/planned_rank.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;

ParallelSpec bounded(int64_t dp, int64_t pp, int64_t ep) {
  ParallelSpec parallel;
  parallel.layout.dp = dp;
  parallel.layout.pp = pp;
  parallel.layout.ep = ep;
  parallel.dispatcher = DispatcherRequest::kAllToAll;
  parallel.exchange = ExchangeSizes::kBounded;
  return parallel;
}

/// Each with exchanges whose rows the host does not learn.
std::vector<NamedLayout> layouts() {
  std::vector<NamedLayout> all = {
      {"ep2", 2, bounded(2, 1, 2)},         {"ep4", 4, bounded(4, 1, 4)},
      {"pp2ep2", 4, bounded(2, 2, 2)},      {"deduplicated", 2, bounded(2, 1, 2)},
      {"interleaved", 4, bounded(2, 2, 2)}, {"ep2etp2", 4, bounded(2, 1, 2)},
      {"full", 2, bounded(2, 1, 2)},        {"all_gather", 4, bounded(4, 1, 4)}};
  all[3].parallel.dispatcher = DispatcherRequest::kDeduplicated;
  all[4].parallel.schedule = PipelineKind::kInterleaved;
  all[4].parallel.chunks_per_stage = 2;
  all[5].parallel.layout.tp = 2;
  all[5].parallel.layout.etp = 2;
  all[6].shard.scope = ShardScope::kFull;
  all[7].parallel.dispatcher = DispatcherRequest::kAllGather;
  return all;
}

/// Whether the host, which runs the experts' map itself, sees the rows: then nothing is stashed. A
/// device, shadow or not, keeps them to itself.
bool host_counts(const NamedLayout& layout, bool on_host) {
  return on_host && layout.parallel.dispatcher != DispatcherRequest::kAllToAll;
}

/// A model with prediction and expert biases whose layers save rows of several kinds.
Settings settings_in(const TemporaryFolder& folder) {
  Settings settings = testing::settings_for_layouts(folder.file(""));
  settings.model.num_layers = 4;
  settings.model.moe.num_experts = 8;
  settings.train.global_batch = 8;
  settings.run.resume = ResumeMode::kNever;
  settings.run.folder = folder.file("run");
  settings.train.stash_page = 1;
  return settings;
}

Settings stashed(Settings settings, double factor = 1.25) {
  settings.train.stash = StashMode::kAuto;
  settings.train.stash_factor = factor;
  return settings;
}

/// A run whose steps were perhaps done again.
struct StashedRun {
  RunEnd end;
  std::vector<int64_t> repeats;  ///< by step, the same on all ranks
  int64_t pages = 0;             ///< at its end, of all ranks together
  int64_t grown_pages = 0;       ///< since its beginning
};

/// What else a run does.
struct RunChange {
  bool validates = false;     ///< before each step
  bool zero_routers = false;  ///< of equal scores the lower expert wins: all rows come to one rank
};

void zero_if_router(const std::string& name, const Tensor& tensor) {
  if (name.find("router") == std::string::npos || !tensor) return;
  const HostTensor weight(tensor, HostTensor::Access::kWrite);
  std::ranges::fill(weight.get().span<float>(), 0.0F);
  weight.store();
}

/// Whole weights, or the shares of those that come and go.
void zero_routers(ModelState& state) {
  for (const ModelParameter& parameter : state.parameters().all())
    zero_if_router(parameter.spec.name, parameter.weight);
  for (const NamedSlice& share : state.owned_model()) zero_if_router(share.name, share.tensor);
}

StashedRun run_stashed(const Settings& settings, const NamedLayout& layout, int64_t steps,
                       const DeviceChooser& choose = choose_host, const RunChange& change = {}) {
  StashedRun run;
  std::mutex mutex;
  const auto use = [&](Trainer& trainer, int64_t rank) {
    if (change.zero_routers) zero_routers(trainer.state());
    const StashPool* const pool = trainer.model().stash();
    const int64_t planned = pool == nullptr ? 0 : trainer.model().placement().stash.planned;
    const int64_t predicted = trainer.prediction().total();
    std::vector<int64_t> repeats;
    while (trainer.position().step < steps) {
      if (change.validates) trainer.validate();
      const StepOutcome outcome = trainer.step();
      repeats.push_back(outcome.repeats);
      if (rank == 0) run.end.losses.push_back(outcome.loss);
    }
    const std::scoped_lock lock(mutex);
    if (pool != nullptr) {
      run.pages += pool->num_pages();
      const int64_t grown = pool->num_pages() - planned;
      run.grown_pages += grown;
      EXPECT_EQ(trainer.prediction().total(), predicted + grown * pool->page_bytes());
      EXPECT_LE(pool->num_pages(), trainer.model().placement().stash.most);
    }
    if (run.repeats.empty()) run.repeats = repeats;
    EXPECT_EQ(run.repeats, repeats) << "rank " << rank;
  };
  run.end.weights = testing::run_ranks(settings, layout, choose, use);
  return run;
}

class Stash : public ::testing::TestWithParam<NamedLayout> {
 protected:
  const TemporaryFolder folder_;
};

/// On the host, and on a device that the host does not reach.
template <typename Use>
void on_both(const Use& use) {
  use(choose_host, true);
  use(testing::choose_shadow, false);
}

TEST_P(Stash, GivesTheBitsOfMemoryForTheWorst) {
  const Settings settings = settings_in(folder_);
  const RunEnd kept = testing::run_steps(settings, GetParam(), 3, false);
  on_both([&](const DeviceChooser& choose, bool on_host) {
    const StashedRun run = run_stashed(stashed(settings, 1.6), GetParam(), 3, choose);
    testing::expect_same_end(run.end, kept);
    EXPECT_EQ(run.pages > 0, !host_counts(GetParam(), on_host));
    EXPECT_THAT(run.repeats, ::testing::Each(0));
    EXPECT_EQ(run.grown_pages, 0);
  });
}

/// Rows in F16 among them.
TEST_P(Stash, KeepsHalves) {
  Settings settings = settings_in(folder_);
  settings.train.precision = Precision::kFp16;
  const RunEnd kept = testing::run_steps(settings, GetParam(), 2, false);
  on_both([&](const DeviceChooser& choose, bool on_host) {
    const StashedRun run = run_stashed(stashed(settings, 1.6), GetParam(), 2, choose);
    testing::expect_same_end(run.end, kept);
    EXPECT_EQ(run.pages > 0, !host_counts(GetParam(), on_host));
  });
}

/// No step is made of what found no room, and none is left out.
TEST_P(Stash, StepsWithoutRoomAreDoneAgain) {
  const Settings settings = settings_in(folder_);
  const RunEnd kept = testing::run_steps(settings, GetParam(), 3, false);
  on_both([&](const DeviceChooser& choose, bool on_host) {
    const StashedRun run = run_stashed(stashed(settings, 1), GetParam(), 3, choose);
    testing::expect_same_end(run.end, kept);
    const bool stashes = !host_counts(GetParam(), on_host);
    EXPECT_EQ(run.repeats.front(), stashes ? 1 : 0) << "what lacked is known at once";
    EXPECT_EQ(run.grown_pages > 0, stashes);
  });
}

TEST_P(Stash, ValidationsLeaveAllPagesFree) {
  const Settings settings = settings_in(folder_);
  const RunEnd kept = testing::run_steps(settings, GetParam(), 2, false);
  const StashedRun run =
      run_stashed(stashed(settings), GetParam(), 2, choose_host, {.validates = true});
  testing::expect_same_end(run.end, kept);
}

TEST_P(Stash, GoesWithRecomputationOffloadingAndMergedPasses) {
  Settings settings = settings_in(folder_);
  const RunEnd kept = testing::run_steps(settings, GetParam(), 2, false);
  settings = stashed(settings);
  const auto check = [&](const Settings& one, const char* what) {
    SCOPED_TRACE(what);
    testing::expect_same_end(run_stashed(one, GetParam(), 2).end, kept);
    testing::expect_same_end(run_stashed(one, GetParam(), 2, testing::choose_shadow).end, kept);
  };
  Settings recomputed = settings;
  recomputed.train.recompute = {"expert_act", "mlp_norm"};
  check(recomputed, "recompute");
  Settings offloaded = settings;
  offloaded.train.offload = {"expert_pre@0-2", "attn_out"};
  check(offloaded, "offload");
  if (GetParam().shard.scope == ShardScope::kFull) return;
  Settings merged = settings;
  merged.train.schedule = "merged";
  check(merged, "merged");
}

/// What the worst routing needs, from the first step on; and what was taken for it stays.
TEST_P(Stash, AllRowsToOneRankFindRoomInTheEnd) {
  Settings settings = settings_in(folder_);
  settings.schedule.peak_lr = 0;
  settings.model.moe.bias_update_speed = 0;
  const RunChange change{.zero_routers = true};
  const RunEnd kept = run_stashed(settings, GetParam(), 2, choose_host, change).end;
  const StashedRun run =
      run_stashed(stashed(settings), GetParam(), 2, testing::choose_shadow, change);
  testing::expect_same_end(run.end, kept);
  EXPECT_THAT(run.repeats, ::testing::ElementsAre(1, 0));
  EXPECT_GT(run.grown_pages, 0);
}

INSTANTIATE_TEST_SUITE_P(All, Stash, ::testing::ValuesIn(testing::share_of_cases(layouts(), 0)),
                         [](const auto& info) { return info.param.name; });

/// Whatever layouts have besides: with exchanges of bounded sizes all of them stash.
TEST(RandomStash, GivesTheBitsOfMemoryForTheWorst) {
  const TemporaryFolder folder;
  int64_t pages = 0;
  int64_t repeats = 0;
  for (uint64_t seed = 901; seed < 901 + testing::share_of_count<uint64_t>(24); ++seed) {
    testing::RandomLayout layout = testing::draw_layout(seed, 8);
    Settings& settings = layout.settings;
    settings.parallel.exchange = ExchangeSizes::kBounded;
    settings.parallel.clone_experts = 0;
    settings.parallel.split_weights = false;
    settings.shard.release_gradients = false;
    testing::prepare_run(layout, 2, folder.file(fmt::format("{}", seed)));
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    const NamedLayout named{"", layout.num_ranks, settings.parallel, settings.shard};
    const RunEnd kept = testing::run_steps(settings, named, 2, false);
    settings.train.stash_page = 1;
    settings.train.stash = StashMode::kAuto;
    const StashedRun run = run_stashed(settings, named, 2, testing::choose_shadow);
    testing::expect_same_end(run.end, {kept.losses, kept.weights});
    pages += run.pages;
    repeats += run.repeats.front();
    const PlannedRank rank = plan_rank(settings, 0, layout.num_ranks);
    EXPECT_NO_THROW(check_plan(plan_step(settings, rank)));
  }
  EXPECT_GT(pages, 0);
  EXPECT_GT(repeats, 0);
}

Settings deep_settings(int64_t num_layers) {
  Settings settings = without_data({});
  settings.model.vocab_size = 64;
  settings.model.hidden_size = 64;
  settings.model.num_layers = num_layers;
  settings.model.moe = {.num_experts = 16, .top_k = 2, .inner_size = 64};
  settings.data.sequence_length = 512;
  settings.train.micro_batch = 4;
  settings.train.global_batch = 64;
  settings.parallel = bounded(8, 1, 8);
  settings.run.device = DeviceChoice::kCpu;
  return settings;
}

ActivationBytes activation_bytes(const Settings& settings) {
  return plan_rank(settings, 0, 8).model.activation_bytes();
}

/// What grows with the layers is for the rows of balanced routing and the factor.
TEST(StashMemory, IsOneWorkingSetAndThePool) {
  const ActivationBytes kept = activation_bytes(deep_settings(16));
  const ActivationBytes stash = activation_bytes(stashed(deep_settings(16)));
  EXPECT_LT(2 * (stash.saved + stash.transient + stash.stash), kept.saved + kept.transient);
  const ActivationBytes fewer = activation_bytes(stashed(deep_settings(8)));
  EXPECT_EQ(stash.transient, fewer.transient) << "all layers share it";
  EXPECT_NEAR(static_cast<double>(stash.stash), 2.0 * static_cast<double>(fewer.stash),
              2.0 * static_cast<double>(host_device().page_bytes()));
  const double large = static_cast<double>(activation_bytes(stashed(deep_settings(16), 2.5)).stash);
  EXPECT_NEAR(large / static_cast<double>(stash.stash), 2, 0.05);
  EXPECT_GT(stash.worst, 4 * stash.stash) << "eight ranks may send eight times the balanced rows";
}

/// Of what pages hold where routing is balanced, no page is more than rows need.
TEST(StashMemory, HasPagesForTheFactor) {
  Settings settings = stashed(deep_settings(16));
  settings.train.stash_page = 1;
  const PlannedRank rank = plan_rank(settings, 0, 8);
  const StashNeed& need = rank.model.placement().stash;
  const StagePrograms& programs = rank.model.programs();
  const int64_t one_layer = layer_stash(programs, programs.part.chunks[0], 3).balanced;
  EXPECT_EQ(need.balanced, 16 * one_layer);
  EXPECT_NEAR(static_cast<double>(need.planned), 1.25 * static_cast<double>(need.balanced), 64);
  EXPECT_EQ(need.most, 8 * need.balanced);
  EXPECT_EQ(need.at(1), need.planned);
  EXPECT_EQ(need.at(2), 2 * need.balanced);
  EXPECT_EQ(need.at(100), need.most);
  EXPECT_NEAR(rank.model.find_skew(rank.model.skewed_bytes(3)), 3, 0.02);
}

TEST(StashMemory, IsPartOfTheStepsPlan) {
  Settings settings = stashed(deep_settings(3));
  settings.train.global_batch = 32;
  const PlannedRank rank = plan_rank(settings, 0, 8);
  const StepPlan plan = plan_step(settings, rank);
  const StepMemory memory = find_step_memory(plan);
  EXPECT_EQ(memory.purposes[number_of(Purpose::kStashed)].slabs,
            align_up(rank.model.activation_bytes().stash));
  EXPECT_NO_THROW(check_plan(plan));
}

/// Between its last use forward and its first backward a value has no memory but its pages.
TEST(StashPrograms, StashBehindTheLastUseAndReloadBeforeTheFirst) {
  const PlannedRank rank = plan_rank(stashed(deep_settings(1)), 0, 8);
  const DerivedProgram& layer = rank.model.layer_programs().begin()->second->derived;
  int num_stashed = 0;
  const auto& forward = layer.forward.program();
  for (size_t i = 0; i < forward.nodes().size(); ++i) {
    const Node& node = forward.nodes()[i];
    if (node.op->name() != "stash_pages") continue;
    ++num_stashed;
    const ValueId value = node.inputs[0];
    EXPECT_EQ(layer.forward.plan().values[value].storage, Storage::kTransient);
    EXPECT_EQ(layer.forward.plan().values[node.outputs[3]].storage, Storage::kSaved) << "its table";
    for (size_t later = i + 1; later < forward.nodes().size(); ++later) {
      const auto& inputs = forward.nodes()[later].inputs;
      EXPECT_EQ(std::ranges::count(inputs, value), 0) << forward.value(value).name;
    }
  }
  EXPECT_GE(num_stashed, 3);
  const auto& backward = layer.backward.program();
  int num_reloaded = 0;
  for (size_t i = 0; i < backward.nodes().size(); ++i) {
    const Node& node = backward.nodes()[i];
    if (node.op->name() != "reload_pages") continue;
    ++num_reloaded;
    size_t user = i + 1;
    while (backward.nodes()[user].op->name() == "reload_pages") ++user;
    EXPECT_EQ(std::ranges::count(backward.nodes()[user].inputs, node.outputs[3]), 1);
  }
  EXPECT_EQ(num_reloaded, num_stashed);
}

/// The host, of whose pages some are there and no more.
class ScarceDevice final : public testing::HostLikeDevice {
 public:
  explicit ScarceDevice(int64_t num_bytes) : free_(num_bytes) {}

  std::string name() const override { return "scarce"; }
  int64_t page_bytes() const override { return 4096; }
  std::byte* reserve(int64_t num_bytes) override { return allocate(num_bytes); }
  bool commit(std::byte* /*pages*/, int64_t num_bytes) override {
    if (num_bytes > free_) return false;
    free_ -= num_bytes;
    return true;
  }
  void release_reserved(std::byte* data, int64_t num_bytes) noexcept override {
    release(data, num_bytes);
  }

 private:
  int64_t free_;
};

/// On all ranks, with what came and what to do.
TEST(StashMemory, WhatCannotGrowEndsTheRun) {
  const TemporaryFolder folder;
  Settings settings = stashed(settings_in(folder), 1);
  const NamedLayout layout = layouts().front();
  const auto planned = [&] {
    Settings own = settings;
    own.parallel = layout.parallel;
    const PlannedRank rank = plan_rank(own, 0, layout.num_ranks);
    return rank.model.placement().stash.planned * rank.model.programs().stash_rule()->page_bytes;
  }();
  const auto choose = [&](const Settings& /*settings*/, World& /*host*/) -> RankDevice {
    return {.backend = Backend(std::make_shared<ScarceDevice>(align_up(planned, 4096)), nullptr,
                               make_cpu_kernels())};
  };
  const RunChange change{.zero_routers = true};
  EXPECT_THAT([&] { run_stashed(settings, layout, 1, choose, change); },
              ::testing::ThrowsMessage<UserError>(
                  AllOf(HasSubstr("train.stash has no room"), HasSubstr("out of memory"),
                        HasSubstr("scarce"), HasSubstr("moe.capacity_factor"))));
}

void expect_refused(const Settings& settings, const std::string& key) {
  EXPECT_THAT([&] { validate(settings); },
              ::testing::ThrowsMessage<UserError>(AllOf(HasSubstr("train.stash"), HasSubstr(key))));
}

TEST(StashSettings, RefusesWhatDoesNotGoTogether) {
  const TemporaryFolder folder;
  const Settings settings = stashed(settings_in(folder));
  EXPECT_NO_THROW(validate(settings));
  Settings split = settings;
  split.parallel.layout.pp = 2;
  split.parallel.split_weights = true;
  expect_refused(split, "parallel.split_weights");
  Settings released = settings;
  released.train.max_grad_norm = 0;
  released.shard.release_gradients = true;
  expect_refused(released, "optim.release_gradients");
  Settings limited = settings;
  limited.train.memory_limit = "1GiB";
  expect_refused(limited, "train.memory_limit");
  Settings contexts = settings;
  contexts.model.mtp_layers = 0;
  contexts.model.moe.bias_update_speed = 0;
  contexts.data.split_documents = true;
  contexts.model.moe.balance_scope = BalanceTokens::kSequence;
  contexts.parallel.layout.cp = 2;
  contexts.parallel.dynamic_cp = true;
  expect_refused(contexts, "parallel.dynamic_cp");
}

}  // namespace
}  // namespace tessera
