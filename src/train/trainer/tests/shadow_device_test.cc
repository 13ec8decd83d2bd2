// Whole runs of several ranks whose memory the host does not reach.
#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"
#include "core/file/file.h"
#include "core/testing/case_share.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class ShadowDevices : public ::testing::TestWithParam<testing::NamedLayout> {
 protected:
  ShadowDevices() { fs::create_directories(folder_); }
  ~ShadowDevices() override { fs::remove_all(folder_); }

  Settings settings(const std::string& run) const {
    Settings settings = testing::settings_for_layouts(folder_);
    settings.run.folder = (folder_ / run).string();
    return settings;
  }

  const fs::path folder_ = fs::temp_directory_path() / unique_name("tessera-shadow-test-");
};

/// The same kernels on the same numbers: the same bits as on the host, also where a run goes on
/// from a checkpoint of the other.
TEST_P(ShadowDevices, TrainSaveAndContinueAsTheHostDoes) {
  const auto whole = testing::run_steps(settings("whole"), GetParam(), 3, false);
  testing::expect_same_end(
      testing::run_steps(settings("shadow"), GetParam(), 3, false, testing::choose_shadow), whole);
  const std::vector last(whole.losses.begin() + 2, whole.losses.end());
  testing::run_steps(settings("from-shadow"), GetParam(), 2, true, testing::choose_shadow);
  testing::expect_same_end(testing::run_steps(settings("from-shadow"), GetParam(), 3, false),
                           {last, whole.weights});
  testing::run_steps(settings("from-host"), GetParam(), 2, true);
  testing::expect_same_end(
      testing::run_steps(settings("from-host"), GetParam(), 3, false, testing::choose_shadow),
      {last, whole.weights});
}

INSTANTIATE_TEST_SUITE_P(
    All, ShadowDevices,
    ::testing::ValuesIn(testing::share_of_cases(testing::layouts_for_checkpoints(), 0)),
    [](const auto& info) { return info.param.name; });

void expect_agreement(const testing::RandomLayout& layout, uint64_t seed) {
  SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
  const Verification result = verify_layout({.settings = layout.settings,
                                             .num_ranks = layout.num_ranks,
                                             .device = testing::choose_shadow});
  EXPECT_TRUE(result.agrees()) << describe(result, false);
}

TEST(ShadowLayouts, GiveTheGradientsOfOneRank) {
  for (uint64_t seed = 401; seed < 401 + testing::share_of_count<uint64_t>(8); ++seed)
    expect_agreement(testing::draw_layout(seed, 8), seed);
}

TEST(ShadowLayouts, CompressedGradientsAgreeWithinTheirRounding) {
  for (uint64_t seed = 501; seed < 501 + testing::share_of_count<uint64_t>(4); ++seed)
    expect_agreement(testing::draw_compressed_layout(seed, 8), seed);
}

/// Staging on a device is another than on the host, and as predicted.
TEST(ShadowLayouts, MemoryIsAsPredicted) {
  for (uint64_t seed = 601; seed < 601 + testing::share_of_count<uint64_t>(6); ++seed) {
    const testing::RandomLayout layout = testing::draw_compressed_layout(seed, 6);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    run_thread_world(layout.num_ranks, [&](World& host) {
      const RankDevice device = testing::choose_shadow(layout.settings, host);
      const RunLayout run = make_run_layout(layout.settings, *device.world);
      const ModelState state(layout.settings, run, *device.world, device.backend);
      EXPECT_EQ(state.bytes(), ModelState::count_bytes(layout.settings, run, device.backend));
    });
  }
}

}  // namespace
}  // namespace tessera
