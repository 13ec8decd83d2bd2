#include "comm/staged_world.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "comm/rows.h"
#include "comm/testing/collective_checks.h"
#include "comm/testing/hidden_device.h"
#include "comm/thread/thread_world.h"
#include "core/host_tensor.h"
#include "core/random.h"

namespace tessera {
namespace {

using Rows = std::vector<int64_t>;
using testing::HiddenDevice;

constexpr int64_t kColumns = 3;
constexpr int64_t kSpareRows = 2;  // of buffers over what an operation moves

OwnedTensor random_rows(int64_t rows, uint64_t seed, int64_t rank) {
  OwnedTensor tensor(DType::kF32, {rows, kColumns});
  Random random(seed, static_cast<uint64_t>(rank));
  for (float& value : tensor.get().span<float>()) value = static_cast<float>(random.next_normal());
  return tensor;
}

void expect_same(const Tensor& found, const Tensor& expected, const char* what) {
  const HostTensor host(found, HostTensor::Access::kRead);
  EXPECT_EQ(std::memcmp(host.get().data, expected.data, static_cast<size_t>(expected.num_bytes())),
            0)
      << what;
}

using Operation = std::function<Pending(Communicator& group, const Tensor& in, const Tensor& out)>;

/// Runs an operation on the host's tensors and on a device's, in every mixture of the two; outputs
/// must be the same, also where the operation writes nothing.
void check_operation(World& world, const char* what, int64_t rows_in, int64_t rows_out,
                     const Operation& start) {
  const OwnedTensor in = random_rows(rows_in + kSpareRows, 1, world.rank());
  const OwnedTensor untouched = random_rows(rows_out + kSpareRows, 2, world.rank());
  OwnedTensor expected = random_rows(rows_out + kSpareRows, 2, world.rank());
  const CommunicatorPtr host = world.make_world_group();
  start(*host, in, expected).wait();

  HiddenDevice device;
  const auto staged = make_staged_world(world);
  const CommunicatorPtr group = staged->make_world_group();
  const OwnedTensor device_in = testing::copy_to_device(in, device);
  for (const bool in_there : {false, true}) {
    for (const bool out_there : {false, true}) {
      const OwnedTensor out = out_there ? testing::copy_to_device(untouched, device)
                                        : random_rows(rows_out + kSpareRows, 2, world.rank());
      start(*group, in_there ? device_in : in, out).wait();
      expect_same(out, expected, what);
    }
  }
  EXPECT_EQ(staged->statistics().counts().size(), 1) << what;
}

Rows rows_of_ranks(int64_t ranks) {
  Rows rows;
  for (int64_t rank = 0; rank < ranks; ++rank) rows.push_back(rank * 2 % 5);
  return rows;
}

TEST(StagedWorld, CollectivesOfADevicesTensors) {
  for (const int64_t ranks : {2, 3, 5}) {
    run_thread_world(ranks, [&](World& world) {
      const Rows rows = rows_of_ranks(ranks);
      const int64_t own = rows[world.rank()];
      const Rows equal(static_cast<size_t>(ranks), own);
      check_operation(world, "all_gather_v", own, sum_rows(rows),
                      [&](Communicator& group, const Tensor& in, const Tensor& out) {
                        return group.all_gather_v(in, out, rows);
                      });
      check_operation(world, "reduce_scatter_v", sum_rows(rows), own,
                      [&](Communicator& group, const Tensor& in, const Tensor& out) {
                        return group.reduce_scatter_v(in, out, rows);
                      });
      check_operation(world, "all_to_all_v", sum_rows(rows), ranks * own,
                      [&](Communicator& group, const Tensor& in, const Tensor& out) {
                        return group.all_to_all_v(in, out, rows, equal);
                      });
      check_operation(world, "all_reduce", 4, 4,
                      [&](Communicator& group, const Tensor& in, const Tensor& out) {
                        return group.all_reduce(in, out, ReduceOp::kMax);
                      });
    });
  }
}

TEST(StagedWorld, OperationsInPlace) {
  run_thread_world(3, [](World& world) {
    HiddenDevice device;
    const auto staged = make_staged_world(world);
    const CommunicatorPtr group = staged->make_world_group();
    OwnedTensor whole = random_rows(6, 4, 0);
    for (int64_t rank = 1; rank < 3; ++rank) {
      const OwnedTensor part = random_rows(6, 4, rank);
      std::memcpy(row_data(whole, 2 * rank), row_data(part, 2 * rank),
                  2 * kColumns * sizeof(float));
    }
    const OwnedTensor gathered = testing::copy_to_device(random_rows(6, 4, world.rank()), device);
    const auto part_of = [&](const Tensor& all) {
      return Tensor{row_data(all, 2 * world.rank()), all.dtype, {2, kColumns}, all.device};
    };
    group->all_gather(part_of(gathered), gathered).wait();
    expect_same(gathered, whole, "all_gather");

    group->reduce_scatter(gathered, part_of(gathered)).wait();
    OwnedTensor tripled(DType::kF32, {2, kColumns});
    for (int64_t i = 0; i < 2 * kColumns; ++i)
      tripled.get().as<float>()[i] = 3 * part_of(whole).as<float>()[i];
    const HostTensor sums(part_of(gathered), HostTensor::Access::kRead);
    for (int64_t i = 0; i < 2 * kColumns; ++i)
      EXPECT_FLOAT_EQ(sums.get().as<float>()[i], tripled.get().as<float>()[i]);
  });
}

TEST(StagedWorld, MessagesAndBroadcastsOfADevicesTensors) {
  run_thread_world(3, [](World& world) {
    HiddenDevice device;
    const auto staged = make_staged_world(world);
    const CommunicatorPtr group = staged->make_world_group();
    const int64_t next = (world.rank() + 1) % 3;
    const int64_t previous = (world.rank() + 2) % 3;
    const OwnedTensor first = testing::copy_to_device(random_rows(4, 5, world.rank()), device);
    const OwnedTensor second = testing::copy_to_device(random_rows(1, 6, world.rank()), device);
    const OwnedTensor got_first(DType::kF32, {4, kColumns}, "a message", device);
    const OwnedTensor got_second(DType::kF32, {1, kColumns}, "a message", device);
    std::vector<Pending> sends;
    sends.push_back(group->send(first, next));
    sends.push_back(group->send(second, next));
    group->receive(got_first, previous).wait();
    group->receive(got_second, previous).wait();
    for (Pending& send : sends) send.wait();
    expect_same(got_first, random_rows(4, 5, previous), "the first message");
    expect_same(got_second, random_rows(1, 6, previous), "the second message");

    group->broadcast(first, 2).wait();
    expect_same(first, random_rows(4, 5, 2), "broadcast");
    group->barrier();
  });
}

TEST(StagedWorld, AGroupOfOneCopies) {
  run_thread_world(2, [](World& world) {
    HiddenDevice device;
    const auto staged = make_staged_world(world);
    const CommunicatorPtr alone = staged->make_group("alone", {world.rank()});
    const OwnedTensor in = testing::copy_to_device(random_rows(4, 7, 0), device);
    const OwnedTensor out(DType::kF32, {4, kColumns}, "a copy", device);
    alone->all_reduce(in, out).wait();
    expect_same(out, random_rows(4, 7, 0), "all_reduce");
    alone->all_gather(in, out).wait();
    expect_same(out, random_rows(4, 7, 0), "all_gather");
  });
}

TEST(StagedWorld, PassesTheChecksOfEveryBackEnd) {
  for (const int64_t ranks : {1, 2, 4}) {
    run_thread_world(ranks, [](World& world) {
      const auto staged = make_staged_world(world);
      check_random_collectives(*staged, 11, 20);
      check_messages(*staged, 12);
      check_wait_order(*staged, 13);
    });
  }
}

/// A rank that fails ends the waits of the others.
TEST(StagedWorld, AFailureReachesAllRanks) {
  EXPECT_THROW(run_thread_world(2,
                                [](World& world) {
                                  HiddenDevice device;
                                  const auto staged = make_staged_world(world);
                                  const CommunicatorPtr group = staged->make_world_group();
                                  if (world.rank() == 1) throw UserError("this rank gives up");
                                  const OwnedTensor x =
                                      testing::copy_to_device(random_rows(2, 8, 0), device);
                                  group->all_reduce(x, x).wait();
                                }),
               UserError);
}

}  // namespace
}  // namespace tessera
