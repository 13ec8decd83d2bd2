// Limits that are a device's own memory: who has one, and what room a choice leaves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "comm/thread/thread_world.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/testing/shadow_backend.h"
#include "train/memory/choose_policy.h"
#include "train/state/load_settings.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

Settings small_run(int64_t num_layers) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, "",
                {"--model.preset=tiny", "--model.vocab_size=256", "--data.sequence_length=256",
                 "--run.cuda_graphs=off", fmt::format("--model.num_layers={}", num_layers)});
  return settings;
}

Backend make_shadow() {
  return testing::make_shadow_backend(make_cpu_kernels());
}

TEST(DeviceLimit, IsForGpusThatNothingElseIsSaidOf) {
  const Backend gpu = make_shadow();
  TrainSettings train;
  EXPECT_TRUE(chooses_for_device(train, gpu));
  EXPECT_FALSE(given_limit(train).has_value());
  EXPECT_FALSE(chooses_for_device(train, make_cpu_kernels()));
  train.offload = {"all"};
  EXPECT_FALSE(chooses_for_device(train, gpu));
  train.offload.clear();
  for (const char* none : {"none", ""}) {
    train.memory_limit = none;
    EXPECT_FALSE(chooses_for_device(train, gpu));
    EXPECT_FALSE(given_limit(train).has_value());
  }
  train.memory_limit = "1KiB";
  EXPECT_FALSE(chooses_for_device(train, gpu));
  EXPECT_EQ(given_limit(train)->bytes, 1024);
  EXPECT_FALSE(given_limit(train)->is_of_device());
}

/// All ranks find the same: the least room, where any of them lacks some.
TEST(DeviceLimit, IsThatOfTheRankWithTheLeastRoom) {
  const Backend gpu = make_shadow();
  constexpr int64_t kDevice = 100000;
  for (const int lacking : {-1, 0, 2}) {
    std::mutex mutex;
    std::vector<std::optional<MemoryLimit>> found;
    run_thread_world(3, [&](World& world) {
      const CommunicatorPtr all = world.make_world_group();
      const auto limit =
          find_lacking(world.rank() != lacking, 7000 - world.rank(), gpu.device(), kDevice, *all);
      const std::lock_guard lock(mutex);
      found.push_back(limit);
    });
    ASSERT_THAT(found, SizeIs(3));
    for (const std::optional<MemoryLimit>& limit : found) {
      ASSERT_EQ(limit.has_value(), lacking >= 0);
      if (!limit) continue;
      EXPECT_EQ(limit->bytes, 6998);
      EXPECT_EQ(limit->spare, kDevice / 100);
      EXPECT_TRUE(limit->is_of_device());
      EXPECT_GT(limit->host_bytes, 0);
      EXPECT_LT(limit->host_bytes, INT64_MAX);
    }
  }
}

/// A choice leaves the spare bytes while there are any, and none where that is impossible.
TEST(DeviceLimit, LeavesRoomAsFarAsThereIsAny) {
  const Backend gpu = make_shadow();
  const Settings settings = small_run(3);
  const BatchShape shape = batch_shape(settings);
  const auto bytes_of = [&](const std::vector<std::string>& recompute) {
    Settings own = settings;
    own.train.recompute = recompute;
    return choose_policy(own, 1, gpu, shape, {.bytes = INT64_MAX}).stages.at(0).kept.bytes();
  };
  const int64_t kept = bytes_of({});
  const int64_t saved = kept - bytes_of({"all"});
  ASSERT_GT(saved, 0);
  const auto choose = [&](int64_t bytes, int64_t spare) {
    return choose_policy(settings, 1, gpu, shape,
                         {.bytes = bytes, .device = "shadow", .spare = spare});
  };
  EXPECT_THAT(choose(kept, saved / 2).entries, IsEmpty()) << "what fits stays as it is";
  const PolicyChoice with_room = choose(kept - 1, saved / 2);
  EXPECT_LE(with_room.stages.at(0).chosen.bytes(), kept - 1 - saved / 2);
  const PolicyChoice tight = choose(kept - 1, kept);
  EXPECT_THAT(tight.entries, Not(IsEmpty()));
  EXPECT_LE(tight.stages.at(0).chosen.bytes(), kept - 1);
  EXPECT_GT(tight.stages.at(0).chosen.bytes(), with_room.stages.at(0).chosen.bytes());
}

/// Experts of a rank may get more rows than their share: a choice has room for some.
TEST(DeviceLimit, LeavesRoomForUnbalancedRouting) {
  const Backend gpu = make_shadow();
  Settings settings = small_run(4);
  settings.parallel.layout.ep = 4;
  settings.train.global_batch = 4 * settings.train.micro_batch;
  const BatchShape shape = batch_shape(settings);
  const PlannedRank kept = plan_rank(settings, 0, 4, gpu, shape);
  const int64_t skewed = kept.model.skewed_bytes(kExpectedSkew);
  ASSERT_GT(skewed, 0);
  EXPECT_EQ(kept.model.skewed_bytes(1), 0);
  const PolicyCost cost =
      choose_policy(settings, 4, gpu, shape, {.bytes = INT64_MAX}).stages.at(0).kept;
  EXPECT_EQ(cost.skewed, 0) << "limits that are given leave no room";
  const PolicyChoice choice =
      choose_policy(settings, 4, gpu, shape, {.bytes = cost.bytes() - 1, .device = "shadow"});
  Settings chosen = settings;
  apply(choice, chosen.train);
  const PlannedRank planned = plan_rank(chosen, 0, 4, gpu, shape);
  EXPECT_LE(choice.stages.at(0).chosen.bytes() + planned.model.skewed_bytes(kExpectedSkew),
            cost.bytes() - 1);
}

/// Nothing is offloaded that the host has no room for.
TEST(DeviceLimit, KeepsToTheHostsMemory) {
  const Backend gpu = make_shadow();
  const Settings settings = small_run(4);
  const BatchShape shape = batch_shape(settings);
  const int64_t kept =
      choose_policy(settings, 1, gpu, shape, {.bytes = INT64_MAX}).stages.at(0).kept.bytes();
  const auto offloaded = [&](int64_t host_bytes) {
    const PolicyChoice choice =
        choose_policy(settings, 1, gpu, shape, {.bytes = kept - 1, .host_bytes = host_bytes});
    return choice.stages.at(0).chosen.memory.activations.offloaded;
  };
  EXPECT_EQ(offloaded(0), 0);
  EXPECT_LE(offloaded(1 << 16), 1 << 16);
}

}  // namespace
}  // namespace tessera
