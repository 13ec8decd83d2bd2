// Budgets of memory beside policies written by hand. Nothing is allocated.
#include "train/memory/choose_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/testing/case_share.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/testing/shadow_backend.h"
#include "step/build/estimate_passes.h"
#include "train/memory/search_policy.h"
#include "train/state/load_settings.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

using Names = std::vector<std::string>;

struct ModelCase {
  std::string name;
  Names arguments;
};
void PrintTo(const ModelCase& model, std::ostream* out) {
  *out << model.name;
}

std::vector<ModelCase> list_models() {
  const Names large = {"--train.precision=bf16", "--model.vocab_size=32768",
                       "--data.sequence_length=4096", "--train.micro_batch=4",
                       "--train.global_batch=8"};
  const auto with = [&](Names more) {
    more.insert(more.end(), large.begin(), large.end());
    return more;
  };
  return {{"tiny",
           {"--model.preset=tiny", "--model.vocab_size=256", "--model.num_layers=6",
            "--data.sequence_length=256", "--train.global_batch=16"}},
          {"qwen3_8_layers", with({"--model.preset=qwen3-30b-a3b", "--model.num_layers=8"})},
          {"mixtral_2_layers", with({"--model.preset=mixtral-8x7b", "--model.num_layers=2"})},
          {"deepseek_3_layers", with({"--model.preset=deepseek-v3", "--model.num_layers=3",
                                      "--moe.first_dense_layers=1"})}};
}

Settings settings_of(const Names& arguments) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, "", arguments);
  return settings;
}

Settings small_settings() {
  return settings_of({"--model.preset=tiny", "--model.vocab_size=256", "--model.num_layers=4"});
}

Backend make_backend(bool on_host) {
  return on_host ? make_cpu_kernels() : testing::make_shadow_backend(make_cpu_kernels());
}

PolicyChoice choose(Settings settings, const Backend& backend, int64_t limit,
                    int64_t num_ranks = 1) {
  settings.train.memory_limit = fmt::format("{}B", limit);
  return *plan_policy(settings, num_ranks, backend, batch_shape(settings));
}

constexpr int64_t kNoLimit = int64_t{1} << 60;

/// The most that a rank takes with what the settings say, and the most time.
std::pair<int64_t, double> find_most(const Settings& settings, const Backend& backend,
                                     int64_t num_ranks = 1) {
  std::pair<int64_t, double> most;
  for (const ChosenStage& stage : choose(settings, backend, kNoLimit, num_ranks).stages) {
    most.first = std::max(most.first, stage.kept.bytes());
    most.second = std::max(most.second, stage.kept.seconds);
  }
  return most;
}

/// What a rank is planned to take of its device, apart from any choosing.
int64_t planned_bytes(const Settings& settings, const Backend& backend) {
  const PlannedRank rank = plan_rank(settings, 0, 1, backend, batch_shape(settings));
  const ActivationBytes activations = rank.model.activation_bytes();
  const bool host = backend.is_host();
  return ModelState::count_bytes(settings, rank.layout, backend).total() + activations.total() +
         predict_overhead(settings, rank.layout, rank.model, backend).total() +
         (host ? snapshot_bytes(settings, rank.layout) + activations.offloaded : 0);
}

/// A run on one rank, with what was compiled for it.
struct OneRank {
  OneRank(const Settings& settings, const Backend& backend)
      : rank(plan_rank(settings, 0, 1, backend, batch_shape(settings))),
        trial(settings, rank, ModelState::count_bytes(settings, rank.layout, backend)) {}

  PlannedRank rank;
  PolicyTrial trial;
};

struct ByHand {
  Names recompute;
  Names offload;
};

std::vector<ByHand> list_by_hand(const Settings& settings) {
  const std::string last = std::to_string(settings.model.num_layers - 1);
  const std::string half = std::to_string(settings.model.num_layers / 2 - 1);
  return {{},
          {{"all"}, {}},
          {{"expert_act"}, {}},
          {{"expert_act", "expert_in"}, {}},
          {{"attn_norm", "mlp_norm"}, {}},
          {{"attn_norm", "mlp_norm", "expert_in", "expert_act"}, {}},
          {{"expert_pre", "expert_act"}, {}},
          {{"attn_out"}, {}},
          {{"all@0-" + half}, {}},
          {{"all@" + last}, {}},
          {{}, {"all"}},
          {{"all"}, {"all"}},
          {{}, {"expert_pre"}},
          {{}, {"expert_pre", "attn_out"}},
          {{}, {"all@0-" + half}},
          {{"expert_act", "expert_in"}, {"expert_pre"}},
          {{"expert_act", "expert_in"}, {"all"}}};
}

class Budget : public ::testing::TestWithParam<std::tuple<ModelCase, bool>> {
 protected:
  bool on_host() const { return std::get<1>(GetParam()); }
  Settings settings() const { return settings_of(std::get<0>(GetParam()).arguments); }
};

/// With the bytes of any of them as the limit, the choice keeps to it and takes no longer; what it
/// prints has the same plan.
TEST_P(Budget, IsAsGoodAsAnyChoiceByHand) {
  const Backend backend = make_backend(on_host());
  const Settings kept = settings();
  const OneRank one(kept, backend);
  const int64_t num_layers = kept.model.all_layers();
  for (const ByHand& by_hand : testing::share_of_cases(list_by_hand(kept), 1)) {
    Settings given = kept;
    given.train.recompute = by_hand.recompute;
    given.train.offload = by_hand.offload;
    const PolicyCost cost = one.trial.judge(given.train.saved_policy());
    SCOPED_TRACE(fmt::format(
        "{} recompute, {} offload: {} B, {} s", ::testing::PrintToString(by_hand.recompute),
        ::testing::PrintToString(by_hand.offload), cost.bytes(), cost.seconds));
    EXPECT_EQ(cost.bytes(), planned_bytes(given, backend));
    const PolicySearchResult found =
        search_policy(one.trial, kept.train.saved_policy(), {.bytes = cost.bytes()});
    ASSERT_TRUE(found.fits);
    const PolicyCost& chosen = found.best.cost;
    EXPECT_LE(chosen.bytes(), cost.bytes());
    EXPECT_LE(chosen.seconds, cost.seconds * (1 + 1e-12));
    Settings pasted = kept;
    for (const LayerEntry& entry :
         list_entries(found.best.choices, &LayerChoice::recompute, num_layers))
      pasted.train.recompute.push_back(entry.to_string());
    for (const LayerEntry& entry :
         list_entries(found.best.choices, &LayerChoice::offload, num_layers))
      pasted.train.offload.push_back(entry.to_string());
    EXPECT_EQ(planned_bytes(pasted, backend), chosen.bytes());
    if (on_host()) {
      EXPECT_THAT(pasted.train.offload, IsEmpty());
    }
  }
}

/// Less memory never takes less time, down to the least.
TEST_P(Budget, TakesLongerTheLessThereIs) {
  const Backend backend = make_backend(on_host());
  const Settings kept = settings();
  const OneRank one(kept, backend);
  const PolicyCost most = one.trial.judge({});
  const int64_t least = one.trial.judge({.recompute = parse_recompute({"all"})}).bytes();
  double seconds = most.seconds;
  constexpr int kSteps = testing::share_of_count(6);
  for (int i = 0; i <= kSteps; ++i) {
    const int64_t limit = most.bytes() - (most.bytes() - least) / kSteps * i;
    const PolicySearchResult found =
        search_policy(one.trial, kept.train.saved_policy(), {.bytes = limit});
    ASSERT_TRUE(found.fits);
    EXPECT_LE(found.best.cost.bytes(), limit);
    EXPECT_GE(found.best.cost.seconds, seconds * (1 - 1e-3));
    seconds = found.best.cost.seconds;
  }
  EXPECT_GT(seconds, most.seconds);
}

INSTANTIATE_TEST_SUITE_P(
    All, Budget,
    ::testing::Combine(::testing::ValuesIn(testing::few_of_cases(list_models())),
                       ::testing::Bool()),
    [](const auto& info) {
      return std::get<0>(info.param).name + (std::get<1>(info.param) ? "_host" : "_device");
    });

TEST(ChoosePolicy, ChangesNothingThatFits) {
  const Backend backend = make_backend(true);
  Settings settings = small_settings();
  EXPECT_FALSE(plan_policy(settings, 1, backend, batch_shape(settings)).has_value());
  settings.train.recompute = {"expert_act"};
  const PolicyChoice choice = choose(settings, backend, find_most(settings, backend).first);
  EXPECT_EQ(choice.recompute, settings.train.recompute);
  EXPECT_THAT(choice.entries, IsEmpty());
  EXPECT_EQ(choice.stages[0].kept.bytes(), choice.stages[0].chosen.bytes());
  EXPECT_THAT(describe(choice), HasSubstr("all fits"));
}

TEST(ChoosePolicy, RefusesWhatCannotBeWithItsParts) {
  const Backend backend = make_backend(true);
  Settings settings = small_settings();
  const auto refusal = [&](int64_t limit) -> std::string {
    try {
      choose(settings, backend, limit);
      return "";
    } catch (const UserError& error) {
      return error.what();
    }
  };
  EXPECT_THAT(refusal(1000), AllOf(HasSubstr("train.memory_limit is \"1000B\""),
                                   HasSubstr("the least that training can do with"),
                                   HasSubstr("on rank 0"), HasSubstr("weights"),
                                   HasSubstr("saved activations"), HasSubstr("train.recompute =")));
  // What the message calls the least can be had, and a little less cannot.
  const OneRank one(settings, backend);
  const int64_t least = search_policy(one.trial, {}, {.bytes = 0}).least.cost.bytes();
  EXPECT_EQ(refusal(least), "");
  EXPECT_NE(refusal(least - 1), "");
}

TEST(ChoosePolicy, KeepsWhatIsGiven) {
  const Backend backend = make_backend(false);
  Settings settings = small_settings();
  settings.train.recompute = {"attn_norm@1-2"};
  settings.train.offload = {"expert_pre@0-1"};
  Settings all = small_settings();
  all.train.recompute = {"all"};
  const int64_t limit = (find_most(settings, backend).first + find_most(all, backend).first) / 2;
  const PolicyChoice choice = choose(settings, backend, limit);
  EXPECT_EQ(choice.recompute.front(), "attn_norm@1-2");
  EXPECT_EQ(choice.offload.front(), "expert_pre@0-1");
  EXPECT_GT(choice.entries.size(), 0);
  Settings pasted = settings;
  apply(choice, pasted.train);
  EXPECT_LE(planned_bytes(pasted, backend), limit) << "and is not refused";
  settings.train.recompute = {"nothing_of_this_name"};
  EXPECT_THAT([&] { choose(settings, backend, limit); },
              ThrowsMessage<UserError>(HasSubstr("nothing_of_this_name")));
}

/// Stages choose for themselves: each keeps to the limit, and one that has room keeps all.
TEST(ChoosePolicy, ChoosesForEachStage) {
  const Backend backend = make_backend(false);
  Settings settings = small_settings();
  settings.parallel.layout.pp = 2;
  settings.train.micro_batch = 2;
  settings.train.global_batch = 16;
  const auto kept = choose(settings, backend, kNoLimit, 2).stages;
  ASSERT_EQ(kept.size(), 2);
  const int64_t less = std::min(kept[0].kept.bytes(), kept[1].kept.bytes());
  const int64_t more = std::max(kept[0].kept.bytes(), kept[1].kept.bytes());
  ASSERT_LT(less, more);
  const PolicyChoice choice = choose(settings, backend, (less + more) / 2, 2);
  for (const ChosenStage& stage : choice.stages) {
    EXPECT_LE(stage.chosen.bytes(), choice.limit.bytes);
    EXPECT_EQ(stage.chosen.bytes() == stage.kept.bytes(), stage.kept.bytes() <= choice.limit.bytes);
  }
}

/// What is exchanged again takes as long again where nothing else takes time.
TEST(ChoosePolicy, CountsExchanges) {
  Settings settings = small_settings();
  settings.parallel.layout.ep = 4;
  settings.train.global_batch = 4 * settings.train.micro_batch;
  const Backend backend = make_backend(true);
  const auto exchange_seconds = [&](const Names& recompute) {
    Settings own = settings;
    own.train.recompute = recompute;
    const PlannedRank rank = plan_rank(own, 0, 4, backend, batch_shape(own));
    const MachineRates rates = {.flops = 1e30, .memory_bytes = 1e30, .link_bytes = 1};
    const DerivedProgram& layer = rank.model.programs().kind_of(0).derived;
    double bytes = 0;
    for (const Executable* executable : {&layer.forward, &layer.backward}) {
      double seconds = 0;
      for (const Node& node : executable->program().nodes()) {
        if (!node.op->communicates()) continue;
        for (const ValueId input : node.inputs)
          seconds += static_cast<double>(executable->program().type(input).num_bytes());
      }
      // Ragged values have fewer rows than their bounds.
      EXPECT_LE(estimate_seconds(*executable, rates), seconds * 1.01);
      EXPECT_GT(estimate_seconds(*executable, rates), seconds / 8);
      bytes += estimate_seconds(*executable, rates);
    }
    return bytes;
  };
  EXPECT_GT(exchange_seconds({"all"}), exchange_seconds({}) * 1.1);
}

/// What is offloaded leaves the memory of rows that might come to others, too.
TEST(ChoosePolicy, KeepsToLimitsWithMemoryByPages) {
  const Backend backend = make_backend(false);
  Settings settings = small_settings();
  settings.model.moe.num_experts = 8;
  settings.data.sequence_length = 512;
  settings.parallel.layout.ep = 8;
  settings.train.global_batch = 8 * settings.train.micro_batch;
  Settings offloaded = settings;
  offloaded.train.offload = {"all"};
  const int64_t kept = find_most(settings, backend, 8).first;
  EXPECT_LE(find_most(offloaded, backend, 8).first, kept);
  Settings all = settings;
  all.train.recompute = {"all"};
  const int64_t limit = (kept + find_most(all, backend, 8).first) / 2;
  ASSERT_LT(limit, kept);
  const PolicyChoice choice = choose(settings, backend, limit, 8);
  EXPECT_LE(choice.stages[0].chosen.bytes(), limit);
}

}  // namespace
}  // namespace tessera
