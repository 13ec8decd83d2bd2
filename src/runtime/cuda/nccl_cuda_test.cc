// What ranks with a GPU each exchange by NCCL; ranks are threads of this process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include "comm/error.h"
#include "comm/testing/collective_checks.h"
#include "comm/testing/device_world.h"
#include "comm/thread/thread_world.h"
#include "core/host_tensor.h"
#include "core/memory.h"
#include "runtime/cuda/cuda_backend.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Runs with as many ranks as the parameter says, where there are that many GPUs.
class NcclWorlds : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    const auto gpus = std::ssize(list_gpus().gpus);
    if (gpus < num_ranks())
      GTEST_SKIP() << "no GPUs: " << num_ranks() << " are needed, " << gpus << " can be seen";
    const NcclInfo nccl = find_nccl();
    if (nccl.version == 0) GTEST_SKIP() << "no GPUs: " << nccl.why;
  }
  static int64_t num_ranks() { return GetParam(); }
  static constexpr CommOptions kByRings = {.timeout_seconds = 30};
  static constexpr CommOptions kByNccl = {.timeout_seconds = 30, .peer_memory = false};

  /// Calls body(world, device) on each rank.
  static void run(const std::function<void(World&, Device&)>& body,
                  const CommOptions& options = kByRings) {
    run_thread_world(
        num_ranks(),
        [&](World& host) {
          const Backend gpu = make_cuda_backend(static_cast<int>(host.rank()));
          const auto world = make_gpu_world(host, gpu, options);
          body(*world, gpu.device());
        },
        options);
  }
  /// The same for checks that give tensors of the host.
  static void run_check(const std::function<void(World&)>& check, const CommOptions& options) {
    run(
        [&](World& world, Device& device) {
          const auto through = make_device_world(world, device, int64_t{1} << 28);
          check(*through);
          device.synchronize();
          world.make_world_group()->barrier();
        },
        options);
  }
  static void run_check(const std::function<void(World&)>& check) { run_check(check, kByRings); }
  static OwnedTensor numbers(Device& device, int64_t count, float first) {
    OwnedTensor tensor(DType::kF32, {count}, "numbers", device);
    const HostTensor host(tensor, HostTensor::Access::kWrite);
    std::iota(host.get().as<float>(), host.get().as<float>() + count, first);
    host.store();
    return tensor;
  }
};

TEST_P(NcclWorlds, RandomCollectives) {
  run_check([](World& world) { check_random_collectives(world, 11, 6, SumOrder::kAny); });
}

/// As where the GPUs do not address one another's memory.
TEST_P(NcclWorlds, RandomCollectivesByNcclAlone) {
  run_check([](World& world) { check_random_collectives(world, 11, 6, SumOrder::kAny); }, kByNccl);
}

TEST_P(NcclWorlds, WaitsInAnyOrder) {
  if (num_ranks() > 3) GTEST_SKIP() << "its messages are between all ranks, not only neighbours";
  run_check([](World& world) { check_wait_order(world, 3); });
}

TEST_P(NcclWorlds, Messages) {
  if (num_ranks() > 3) GTEST_SKIP() << "its messages are between all ranks, not only neighbours";
  run_check([](World& world) { check_messages(world, 5); });
}

TEST_P(NcclWorlds, LargeBuffers) {
  run_check([](World& world) { check_large(world, int64_t{1} << 26); });
}

/// More than the memory that sums of BF16 go through.
void check_large_sum(World& world, Device& device) {
  const CommunicatorPtr group = world.make_world_group();
  const int64_t count = (int64_t{40} << 20) + 5;
  const OwnedTensor tensor(DType::kBF16, {count}, "numbers", device);
  {
    const HostTensor host(tensor, HostTensor::Access::kWrite);
    for (int64_t i = 0; i < count; ++i)
      host.get().as<Bf16>()[i] = Bf16(static_cast<float>(i % 64 + world.rank()));
    host.store();
  }
  group->all_reduce(tensor, tensor).wait();
  const HostTensor sum(tensor, HostTensor::Access::kRead);
  const int64_t size = world.size();
  const int64_t of_ranks = size * (size - 1) / 2;
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bf16 expected(static_cast<float>(size * (i % 64) + of_ranks));
    wrong += sum.get().as<Bf16>()[i].bits != expected.bits ? 1 : 0;
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(NcclWorlds, LargeSumsOfBf16) {
  run(check_large_sum);
}

TEST_P(NcclWorlds, LargeSumsOfBf16ByNcclAlone) {
  run(check_large_sum, kByNccl);
}

/// Operations follow the device's earlier work, and its later work follows a wait, while the host
/// goes on at once.
TEST_P(NcclWorlds, OrdersTheDevicesWork) {
  run([](World& world, Device& device) {
    const CommunicatorPtr group = world.make_world_group();
    const int64_t count = int64_t{1} << 22;
    const OwnedTensor source = numbers(device, count, 1);
    const OwnedTensor sum(DType::kF32, {count}, "sums", device);
    const OwnedTensor last(DType::kF32, {count}, "results", device);
    for (int round = 0; round < 10; ++round) {
      device.zero(sum.get().data, sum.get().num_bytes());
      device.copy(sum.get().data, source.get().data, source.get().num_bytes());
      group->all_reduce(sum, sum).wait();
      device.copy(last.get().data, sum.get().data, sum.get().num_bytes());
      device.zero(sum.get().data, sum.get().num_bytes());
    }
    const HostTensor found(last, HostTensor::Access::kRead);
    const auto ranks = static_cast<float>(world.size());
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; ++i)
      wrong += found.get().as<float>()[i] != ranks * static_cast<float>(i + 1) ? 1 : 0;
    EXPECT_EQ(wrong, 0);
  });
}

/// Who observes learns when the GPU did the exchanges, not when the host looked: a long time after
/// they had ended.
TEST_P(NcclWorlds, ObserversLearnTheGpusTimes) {
  run([](World& world, Device& device) {
    const CommunicatorPtr group = world.make_world_group();
    const int64_t count = int64_t{1} << 26;
    const OwnedTensor tensor = numbers(device, count, 0);
    group->all_reduce(tensor, tensor).wait();
    device.synchronize();
    group->barrier();
    std::vector<CommEvent> events;
    world.statistics().observe([&](const CommEvent& event) { events.push_back(event); });
    const auto begin = std::chrono::steady_clock::now();
    Pending first = group->all_reduce(tensor, tensor);
    Pending second = group->all_reduce(tensor, tensor);
    while (!second.done()) std::this_thread::yield();
    const auto done = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    first.wait();
    second.wait();
    EXPECT_TRUE(events.empty()) << "not known before a synchronisation";
    device.synchronize();
    ASSERT_EQ(events.size(), 2);
    std::ranges::sort(events, {}, &CommEvent::begin);  // they come as they were waited for
    const std::chrono::microseconds slack{200};        // two clocks
    EXPECT_GE(events[0].begin, begin - slack);
    EXPECT_LT(events[0].begin, events[0].end);
    EXPECT_LE(events[0].end, events[1].begin + slack);
    EXPECT_LE(events[1].end, done + slack) << "when the host looked";
    EXPECT_EQ(events[1].kind, CommKind::kAllReduce);
    world.statistics().observe(nullptr);
  });
}

/// Two directions between neighbours at a time, as in a pipeline.
TEST_P(NcclWorlds, MessagesBothWaysAtATime) {
  run([](World& world, Device& device) {
    const CommunicatorPtr group = world.make_world_group();
    group->connect_neighbours();
    const int64_t size = world.size();
    const int64_t next = (world.rank() + 1) % size;
    const int64_t previous = (world.rank() + size - 1) % size;
    const int64_t count = int64_t{1} << 20;
    const OwnedTensor own = numbers(device, count, static_cast<float>(world.rank()));
    const OwnedTensor from_next(DType::kF32, {count}, "messages", device);
    const OwnedTensor from_previous(DType::kF32, {count}, "messages", device);
    for (int round = 0; round < 5; ++round) {
      Pending to_next = group->send(own, next);
      Pending to_previous = group->send(own, previous);
      // Of two ranks each is the other's next and previous one.
      group->receive(from_previous, previous).wait();
      group->receive(from_next, next).wait();
      to_next.wait();
      to_previous.wait();
    }
    const HostTensor one(from_next, HostTensor::Access::kRead);
    const HostTensor other(from_previous, HostTensor::Access::kRead);
    EXPECT_EQ(one.get().as<float>()[count - 1], static_cast<float>(next + count - 1));
    EXPECT_EQ(other.get().as<float>()[0], static_cast<float>(previous));
  });
}

/// Operations that host and device both have under way: the host's go by the host's world.
TEST_P(NcclWorlds, HostTensorsGoOverTheHost) {
  run([](World& world, Device& device) {
    const CommunicatorPtr group = world.make_world_group();
    const OwnedTensor on_gpu = numbers(device, 1000, 1);
    std::vector<double> values = {1.5, static_cast<double>(world.rank())};
    const Tensor on_host = view(std::span(values), {2});
    Pending first = group->all_reduce(on_gpu, on_gpu);
    group->all_reduce(on_host, on_host).wait();
    first.wait();
    const HostTensor sum(on_gpu, HostTensor::Access::kRead);
    EXPECT_EQ(sum.get().as<float>()[999], 1000.0F * static_cast<float>(world.size()));
    EXPECT_EQ(values[0], 1.5 * static_cast<double>(world.size()));
  });
}

/// A rank that ends: every other one is told, within the limit, and ends in order.
TEST_P(NcclWorlds, ALostRankEndsAll) {
  std::atomic<int> told = 0;
  const auto body = [&](World& world, Device& device) {
    const CommunicatorPtr group = world.make_world_group();
    const OwnedTensor tensor = numbers(device, 1000, 0);
    group->all_reduce(tensor, tensor).wait();
    device.synchronize();
    if (world.rank() == num_ranks() - 1) user_error("no more");
    try {
      group->all_reduce(tensor, tensor).wait();
      device.synchronize();
      ADD_FAILURE() << "rank " << world.rank() << " was not told";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("all_reduce 1 of group \"world\""));
      ++told;
      throw;
    }
  };
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(run(body, {.timeout_seconds = 5}), UserError);
  EXPECT_EQ(told, num_ranks() - 1);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

TEST_P(NcclWorlds, TimeLimitNamesTheOperation) {
  std::atomic<int> told = 0;
  const auto body = [&](World& world, Device& device) {
    const CommunicatorPtr group = world.make_world_group();
    const OwnedTensor tensor = numbers(device, 1000, 0);
    group->all_reduce(tensor, tensor).wait();
    device.synchronize();
    if (world.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::seconds(6));
      return;
    }
    try {
      group->all_reduce(tensor, tensor).wait();
      device.synchronize();
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("the time limit is 2"));
      ++told;
      throw;
    }
  };
  EXPECT_THROW(run(body, {.timeout_seconds = 2}), UserError);
  EXPECT_GE(told, 1);
}

/// Each group's kernels wait, and none may wait for the other's end.
TEST_P(NcclWorlds, TimeLimitEndsTheWaitsOfAllGroups) {
  for (const bool peer_memory : {true, false}) {
    std::atomic<int> told = 0;
    const auto body = [&](World& world, Device& device) {
      std::vector<CommunicatorPtr> groups;
      std::vector<OwnedTensor> tensors;
      for (const std::string name : {"one", "two", "three"}) {
        std::vector<int64_t> ranks(world.size());
        std::iota(ranks.begin(), ranks.end(), 0);
        groups.push_back(world.make_group(name, ranks));
        tensors.push_back(numbers(device, 1000, 0));
      }
      groups[0]->barrier();  // nobody takes memory while another's kernels wait
      for (size_t i = 0; i < groups.size(); ++i)
        groups[i]->all_reduce(tensors[i], tensors[i]).wait();
      device.synchronize();
      if (world.rank() == 0) {
        std::this_thread::sleep_for(std::chrono::seconds(6));
        return;
      }
      try {
        std::vector<Pending> started;
        for (size_t i = 0; i < groups.size(); ++i)
          started.push_back(groups[i]->all_reduce(tensors[i], tensors[i]));
        for (Pending& operation : started) operation.wait();
        device.synchronize();
      } catch (const CommError& error) {
        EXPECT_THAT(error.what(), HasSubstr("the time limit is 2"));
        ++told;
        throw;
      }
    };
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THROW(run(body, {.timeout_seconds = 2, .peer_memory = peer_memory}), UserError);
    EXPECT_GE(told, 1);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclWorlds, ::testing::Values(2, 3, 4));

}  // namespace
}  // namespace tessera
