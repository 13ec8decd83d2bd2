#include "comm/thread/thread_world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "comm/error.h"
#include "comm/testing/collective_checks.h"
#include "core/memory.h"

namespace tessera {
namespace {

using testing::HasSubstr;

class ThreadWorlds : public testing::TestWithParam<int64_t> {};

TEST_P(ThreadWorlds, RandomCollectives) {
  run_thread_world(GetParam(), [](World& world) { check_random_collectives(world, 11, 40); });
}

TEST_P(ThreadWorlds, Messages) {
  run_thread_world(GetParam(), [](World& world) { check_messages(world, 5); });
}

TEST_P(ThreadWorlds, WaitsInAnyOrder) {
  run_thread_world(GetParam(), [](World& world) { check_wait_order(world, 3); });
}

TEST_P(ThreadWorlds, LargeBuffers) {
  run_thread_world(GetParam(), [](World& world) { check_large(world, 1 << 20); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadWorlds, testing::Values(1, 2, 3, 4, 8));

template <typename Error>
std::string message_of_world(int64_t num_ranks, const std::function<void(World&)>& body,
                             double seconds = 100) {
  try {
    run_thread_world(num_ranks, body, {.timeout_seconds = seconds});
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(ThreadWorld, FirstExceptionEndsAll) {
  std::atomic<int> ended = 0;
  const auto body = [&](World& world) {
    const CommunicatorPtr group = world.make_world_group();
    const OwnedTensor tensor(DType::kF32, {4});
    try {
      // Given up while the exception unwinds; the reason is the exception all the same.
      Pending pending = group->all_reduce(tensor, tensor);
      if (world.rank() == 2) user_error("no more");
      pending.wait();
      group->barrier();
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 2"));
      ++ended;
      throw;
    }
  };
  EXPECT_EQ(message_of_world<UserError>(4, body), "no more");
  EXPECT_EQ(ended, 3);
}

TEST(ThreadWorld, TimeLimitNamesWhoIsMissing) {
  const auto body = [](World& world) {
    const CommunicatorPtr group = world.make_group("tp", {2, 0, 1});
    const OwnedTensor tensor(DType::kF32, {4});
    group->barrier();
    if (world.rank() != 1) group->all_reduce(tensor, tensor).wait();
  };
  EXPECT_THAT(message_of_world<CommError>(3, body, 0.2),
              HasSubstr("for all_reduce 1 of group \"tp\" (ranks 2 0 1), missing rank 1: the "
                        "time limit is 0.2 s"));
}

TEST(ThreadWorld, DifferentOperationsAreNamed) {
  const auto body = [](World& world) {
    const CommunicatorPtr group = world.make_world_group();
    const OwnedTensor tensor(DType::kF32, {2});
    if (world.rank() == 0) group->broadcast(tensor, 0).wait();
    if (world.rank() == 1) group->all_reduce(tensor, tensor).wait();
  };
  const std::string text = message_of_world<InternalError>(2, body);
  EXPECT_THAT(text, HasSubstr("all_reduce"));
  EXPECT_THAT(text, HasSubstr("broadcast"));
}

TEST(ThreadWorld, DifferentSizesAreNamed) {
  const auto body = [](World& world) {
    const OwnedTensor tensor(DType::kF32, {2 + world.rank()});
    world.make_world_group()->all_reduce(tensor, tensor).wait();
  };
  const std::string text = message_of_world<InternalError>(2, body);
  EXPECT_THAT(text, HasSubstr("8 bytes"));
  EXPECT_THAT(text, HasSubstr("12 bytes"));
}

TEST(ThreadWorld, MessageOfAnotherSizeIsRefused) {
  const auto body = [](World& world) {
    const OwnedTensor tensor(DType::kF32, {2 + world.rank()});
    const CommunicatorPtr group = world.make_world_group();
    (world.rank() == 0 ? group->send(tensor, 1) : group->receive(tensor, 0)).wait();
  };
  EXPECT_THAT(message_of_world<InternalError>(2, body), HasSubstr("8 bytes sent, 12 expected"));
}

TEST(Communicator, ChecksShapes) {
  const CommunicatorPtr group = make_single_communicator("dp");
  const OwnedTensor two(DType::kF32, {2});
  const OwnedTensor three(DType::kF32, {3});
  const OwnedTensor integers(DType::kI32, {2});
  const OwnedTensor bytes(DType::kU8, {2});
  EXPECT_THROW((void)group->all_gather(two, three), InternalError);
  EXPECT_THROW((void)group->all_reduce(two, integers), InternalError);
  EXPECT_THROW((void)group->all_reduce(bytes, bytes), InternalError);
  EXPECT_THROW((void)group->send(two, 0), InternalError);
  EXPECT_THROW(make_single_world()->make_group("tp", {0, 0}), InternalError);
  EXPECT_THROW(make_single_world()->make_group("tp", {}), InternalError);
}

TEST(SingleWorld, AnswersByCopying) {
  const auto world = make_single_world();
  check_random_collectives(*world, 7, 50);
  EXPECT_EQ(world->statistics().total_bytes(), 0);
  EXPECT_GT(world->statistics().counts().size(), 4U);
}

}  // namespace
}  // namespace tessera
