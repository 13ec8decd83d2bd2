#include <gtest/gtest.h>

#include <cmath>

#include "core/file/file.h"
#include "core/testing/case_share.h"
#include "train/testing/layout_runs.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class LayoutCheckpoints : public ::testing::TestWithParam<testing::NamedLayout> {
 protected:
  LayoutCheckpoints() { fs::create_directories(folder_); }
  ~LayoutCheckpoints() override { fs::remove_all(folder_); }

  const fs::path folder_ = fs::temp_directory_path() / unique_name("tessera-layouts-test-");
};

/// A layout's checkpoint continues on every layout: the next step's loss and weights are those of
/// the run on one rank, up to rounding.
TEST_P(LayoutCheckpoints, ContinueOnAnyOther) {
  const auto layouts = testing::layouts_for_checkpoints();
  Settings settings = testing::settings_for_layouts(folder_);
  settings.run.folder = (folder_ / "whole").string();
  const testing::RunEnd whole = testing::run_steps(settings, layouts[0], 3, false);
  settings.run.folder = (folder_ / "saved").string();
  testing::run_steps(settings, GetParam(), 2, true);
  for (const auto& loaded : testing::share_of_cases(layouts, 0)) {
    SCOPED_TRACE("continued on " + loaded.name);
    const testing::RunEnd end = testing::run_steps(settings, loaded, 3, false);
    ASSERT_EQ(end.losses.size(), 1);
    EXPECT_NEAR(end.losses[0], whole.losses[2], 1e-5 * whole.losses[2]);
    ASSERT_EQ(end.weights.size(), whole.weights.size());
    for (size_t i = 0; i < whole.weights.size(); ++i)
      ASSERT_NEAR(end.weights[i], whole.weights[i], 1e-4) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, LayoutCheckpoints,
    ::testing::ValuesIn(testing::share_of_cases(testing::layouts_for_checkpoints(), 2)),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
