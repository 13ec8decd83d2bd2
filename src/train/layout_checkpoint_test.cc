#include <gtest/gtest.h>

#include <cmath>

#include "core/file.h"
#include "train/testing/layout_runs.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Every layout's checkpoint continues on every layout: the next step's loss and weights are those
/// of the run on one rank, up to rounding.
TEST(LayoutCheckpoints, AnyLayoutContinuesAnyOthers) {
  const fs::path folder = fs::temp_directory_path() / unique_name("tessera-layouts-test-");
  fs::create_directories(folder);
  Settings settings = testing::settings_for_layouts(folder);
  const auto layouts = testing::layouts_for_checkpoints();
  settings.run.folder = (folder / "whole").string();
  const testing::RunEnd whole = testing::run_steps(settings, layouts[0], 3, false);
  for (const auto& saved : layouts) {
    settings.run.folder = (folder / saved.name).string();
    testing::run_steps(settings, saved, 2, true);
    for (const auto& loaded : layouts) {
      SCOPED_TRACE(saved.name + " continued on " + loaded.name);
      const testing::RunEnd end = testing::run_steps(settings, loaded, 3, false);
      ASSERT_EQ(end.losses.size(), 1);
      EXPECT_NEAR(end.losses[0], whole.losses[2], 1e-5 * whole.losses[2]);
      ASSERT_EQ(end.weights.size(), whole.weights.size());
      for (size_t i = 0; i < whole.weights.size(); ++i)
        ASSERT_NEAR(end.weights[i], whole.weights[i], 1e-4) << i;
    }
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace tessera
