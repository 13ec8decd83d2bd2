// Runs whose products are of FP8 numbers, on devices that the host stands for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/file/file.h"
#include "core/testing/case_share.h"
#include "model/proof/prove_stage.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/memory/planned_rank.h"
#include "train/testing/layout_runs.h"
#include "train/testing/option_families.h"
#include "train/testing/shadow_devices.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class Fp8Products : public ::testing::Test {
 protected:
  Fp8Products() { fs::create_directories(folder_); }
  ~Fp8Products() override { fs::remove_all(folder_); }

  /// Of sizes that tensor cores take, and three micro-batches.
  Settings settings(const std::string& run, const char* recipe) const {
    Settings settings = testing::settings_for_layouts(folder_);
    settings.run.folder = (folder_ / run).string();
    settings.model.mtp_layers = 0;  // which has the embedding's gradient added up in another order
    settings.model.hidden_size = 256;
    settings.model.head_size = 64;
    settings.model.inner_size = 256;
    settings.model.moe.inner_size = 256;
    settings.model.moe.shared_inner_size = 128;
    settings.model.init_deviation = 0.05;
    settings.schedule.peak_lr = 1e-3;
    settings.train.precision = Precision::kFp8;
    settings.precision.recipe = recipe;
    return settings;
  }

  const fs::path folder_ = fs::temp_directory_path() / unique_name("tessera-fp8-test-");
};

const testing::NamedLayout kOne{"one"};

std::vector<testing::NamedLayout> layouts() {
  return {{"tp2", 2, {.layout = {.tp = 2}}},
          {"ep2", 2, {.layout = {.ep = 2}}},
          // Of the rows that there are addresses for few come.
          {"ep4", 4, {.layout = {.tp = 2, .ep = 4}, .dispatcher = DispatcherRequest::kAllToAll}},
          {"etp2", 2, {.layout = {.tp = 2, .etp = 2}}},
          {"pp2", 2, {.layout = {.pp = 2}}},
          {"full2", 2, {}, {.scope = ShardScope::kFull}}};
}

/// The operands are the same numbers, so results differ by sums and roundings alone.
TEST_F(Fp8Products, LearnAsTheEmulation) {
  const std::vector<std::pair<const char*, SavedPrecision>> cases = {
      {"rowwise", SavedPrecision::kBf16},
      {"blockwise", SavedPrecision::kBf16},
      {"rowwise", SavedPrecision::kFp8},
      {"rowwise", SavedPrecision::kFp8All}};
  for (const auto& [recipe, saved] : testing::share_of_cases(cases, 0)) {
    SCOPED_TRACE(recipe);
    Settings emulated = settings("emulated", recipe);
    emulated.precision.emulate = true;
    emulated.precision.saved = saved;
    const auto expected = testing::run_steps(emulated, kOne, 3, false, testing::choose_shadow);
    Settings of_one = settings("one", recipe);
    of_one.precision.saved = saved;
    const auto one = testing::run_steps(of_one, kOne, 3, false, testing::choose_shadow);
    EXPECT_NE(one.weights, expected.weights);
    for (size_t i = 0; i < one.losses.size(); ++i)
      EXPECT_NEAR(one.losses[i], expected.losses[i], 0.01 * expected.losses[i]);
    for (const testing::NamedLayout& layout : testing::share_of_cases(layouts(), 1)) {
      SCOPED_TRACE(layout.name);
      Settings laid_out = settings(layout.name, recipe);
      laid_out.precision.saved = saved;
      const auto found = testing::run_steps(laid_out, layout, 3, false, testing::choose_shadow);
      for (size_t i = 0; i < one.losses.size(); ++i)
        EXPECT_NEAR(found.losses[i], expected.losses[i], 0.01 * expected.losses[i]);
      if (layout.name == "pp2") testing::expect_same_end(found, one);
    }
  }
}

TEST_F(Fp8Products, RunsContinueAndStepsAreRepeatedToTheBit) {
  const auto whole =
      testing::run_steps(settings("whole", "rowwise"), kOne, 4, false, testing::choose_shadow);
  testing::run_steps(settings("parts", "rowwise"), kOne, 2, true, testing::choose_shadow);
  const auto rest =
      testing::run_steps(settings("parts", "rowwise"), kOne, 4, false, testing::choose_shadow);
  testing::expect_same_end(rest, {{whole.losses.begin() + 2, whole.losses.end()}, whole.weights});
  Settings without_copies = settings("without", "rowwise");
  without_copies.precision.weight_copies = false;
  testing::expect_same_end(
      testing::run_steps(without_copies, kOne, 4, false, testing::choose_shadow), whole);
  const auto recorded = testing::run_steps(settings("recorded", "rowwise"), kOne, 4, false,
                                           testing::choose_recording_shadow);
  testing::expect_same_end(recorded, whole);
}

/// All families of options have programs that a GPU's kernels take, and layouts that are proven.
class PlannedFp8 : public ::testing::TestWithParam<testing::OptionFamily> {};

TEST_P(PlannedFp8, ProgramsAreTakenAndProven) {
  if (!built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const char* recipe : {"rowwise", "blockwise"}) {
    for (const auto& [gradients, saved] :
         {std::pair(true, SavedPrecision::kBf16), std::pair(false, SavedPrecision::kBf16),
          std::pair(true, SavedPrecision::kFp8), std::pair(false, SavedPrecision::kFp8),
          std::pair(true, SavedPrecision::kFp8All)}) {
      Settings settings = testing::settings_of(GetParam());
      settings.run.device = DeviceChoice::kCuda;
      settings.train.precision = Precision::kFp8;
      settings.train.global_batch = 2 * settings.train.micro_batch;
      settings.precision.recipe = recipe;
      settings.precision.weight_gradients = gradients;
      settings.precision.saved = saved;
      settings.data.tokens = "tokens";
      settings.train.steps = settings.schedule.num_steps = 2;
      try {
        validate(settings);
      } catch (const UserError& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr("train.precision = \"fp8\""));
        return;
      }
      const PlannedRank planned = plan_rank(settings, 0, 1);
      EXPECT_TRUE(prove_stage(planned.model.programs()).faults.empty());
      if (settings.precision.recipe == "rowwise") {
        EXPECT_GT(planned.model.activation_bytes().copies, 0) << "no product is in FP8";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlannedFp8,
                         ::testing::ValuesIn(testing::share_of_cases(testing::option_families(),
                                                                     2)),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera
