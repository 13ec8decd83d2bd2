#pragma once

#include <gtest/gtest.h>

#include "core/testing/case_share.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"

/// Runs whose optimizer state is in the host's memory beside runs whose state is the device's.
namespace tessera::testing {

inline bool may_offload(const ShardSettings& shard, int64_t num_ranks) {
  return shard.scope != ShardScope::kFull || num_ranks == 1;
}

/// A run goes on from a checkpoint of the other, in both directions, to the end that `one` alone
/// has on the host.
inline void expect_same_when_changed(Settings settings, const TemporaryFolder& folder,
                                     const NamedLayout& one, const NamedLayout& other,
                                     const DeviceChooser& choose) {
  settings.run.folder = folder.file("whole");
  const RunEnd whole = run_steps(settings, one, 3, false);
  for (const bool other_first : {false, true}) {
    settings.run.folder = folder.file(other_first ? "other-first" : "one-first");
    run_steps(settings, other_first ? other : one, 2, true, choose);
    const RunEnd end = run_steps(settings, other_first ? one : other, 3, false, choose);
    EXPECT_EQ(end.losses.back(), whole.losses.back());
    EXPECT_EQ(end.weights, whole.weights);
  }
}

/// So many steps on random layouts that `takes` lets through give the same bits on the host and,
/// with shards that `change` changed, on a shadow device.
template <typename Takes, typename Change>
void expect_same_on_random_layouts(uint64_t first_seed, uint64_t count, int64_t num_steps,
                                   const Takes& takes, const Change& change) {
  const TemporaryFolder folder;
  int num_cases = 0;
  for (uint64_t seed = first_seed; seed < first_seed + share_of_count<uint64_t>(count); ++seed) {
    RandomLayout layout = draw_layout(seed, 6);
    Settings& settings = layout.settings;
    if (!may_offload(settings.shard, layout.num_ranks) || !takes(settings)) continue;
    prepare_run(layout, 2, folder.file(fmt::format("{}", seed)));
    NamedLayout named{"", layout.num_ranks, settings.parallel, settings.shard};
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(layout)));
    named.shard.state_on_host = false;
    const RunEnd on_device = run_steps(settings, named, num_steps, false);
    change(named.shard);
    expect_same_end(run_steps(settings, named, num_steps, false, choose_shadow), on_device);
    ++num_cases;
  }
  EXPECT_GT(num_cases, share_of_count(8));
}

}  // namespace tessera::testing
