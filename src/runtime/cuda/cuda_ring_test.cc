// Exchanges through memory that several ranks address. Ranks are threads of this process that share
// the GPUs there are.
#include "runtime/cuda/cuda_ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "comm/thread/thread_world.h"
#include "core/host_tensor.h"
#include "core/memory.h"
#include "ops/testing/gpu_test.h"
#include "runtime/cuda/cuda_backend.h"

namespace tessera::cuda {
namespace {

using Counts = std::vector<int64_t>;

/// What a rank of a test has.
struct Place {
  Communicator& group;
  CudaDevice& device;
  CudaRing& ring;

  int64_t rank() const { return group.rank(); }
  int64_t size() const { return group.size(); }
};

class CudaRings : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    if (list_gpus().gpus.empty()) GTEST_SKIP() << "no GPUs";
  }

  static void run(const std::function<void(const Place&)>& body) {
    const int64_t num_gpus = std::ssize(list_gpus().gpus);
    run_thread_world(GetParam(), [&](World& world) {
      const Backend gpu = make_cuda_backend(static_cast<int>(world.rank() % num_gpus));
      auto& device = dynamic_cast<CudaDevice&>(gpu.device());
      const CommunicatorPtr group = world.make_world_group();
      const auto ring = CudaRing::make(*group, device);
      ASSERT_NE(ring, nullptr) << "the GPUs do not address one another's memory";
      body({*group, device, *ring});
      device.synchronize();
      group->barrier();  // giving memory back waits for kernels, those of other ranks too
    });
  }
};

OwnedTensor bytes_on(CudaDevice& device, const std::vector<uint8_t>& bytes) {
  OwnedTensor tensor(DType::kU8, {std::ssize(bytes)}, "rows", device);
  const HostTensor host(tensor, HostTensor::Access::kWrite);
  std::ranges::copy(bytes, host.get().as<uint8_t>());
  host.store();
  return tensor;
}

std::vector<uint8_t> bytes_of(const OwnedTensor& tensor) {
  const HostTensor host(tensor, HostTensor::Access::kRead);
  const auto* const first = host.get().as<uint8_t>();
  return {first, first + tensor.get().num_bytes()};
}

/// Byte i of what rank `from` sends to rank `to`.
uint8_t sent_byte(int64_t from, int64_t to, int64_t i, int64_t round) {
  return static_cast<uint8_t>((i * 31 + from * 7 + to * 13 + round * 5 + i / 255) & 0xff);
}

/// The rows that each rank sends to each: the same on all ranks.
std::vector<Counts> draw_rows(int64_t size, int64_t most, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Counts> rows(size, Counts(size));
  for (Counts& row : rows) {
    for (int64_t& count : row) {
      const int kind = static_cast<int>(random() % 4);
      count = kind == 0 ? 0 : kind == 1 ? 1 : static_cast<int64_t>(random() % (most + 1));
    }
  }
  return rows;
}

/// A few rounds, so that counts of chunks go on from one exchange to the next.
void check_all_to_all(const Place& place, int64_t row_bytes, int64_t most, bool counts_on_device) {
  constexpr int kRounds = 4;
  struct Round {
    OwnedTensor in;
    OwnedTensor out;
    OwnedTensor send;
    OwnedTensor receive;
    std::vector<uint8_t> expected;
    RingAllToAll exchange;
  };
  std::vector<Round> rounds;
  for (int64_t r = 0; r < kRounds; ++r) {
    const std::vector<Counts> rows = draw_rows(place.size(), most, 100 * row_bytes + r);
    std::vector<uint8_t> in;
    std::vector<uint8_t> expected;
    Counts receive;
    for (int64_t other = 0; other < place.size(); ++other) {
      const int64_t sent = rows[place.rank()][other] * row_bytes;
      for (int64_t i = 0; i < sent; ++i) in.push_back(sent_byte(place.rank(), other, i, r));
      receive.push_back(rows[other][place.rank()]);
      for (int64_t i = 0; i < receive.back() * row_bytes; ++i)
        expected.push_back(sent_byte(other, place.rank(), i, r));
    }
    const auto counts = [&](const Counts& values) {
      OwnedTensor tensor(DType::kI64, {place.size()}, "counts", place.device);
      const HostTensor host(tensor, HostTensor::Access::kWrite);
      std::ranges::copy(values, host.get().as<int64_t>());
      host.store();
      return tensor;
    };
    Round round{bytes_on(place.device, in),
                bytes_on(place.device, std::vector<uint8_t>(expected.size(), 0xee)),
                counts(rows[place.rank()]),
                counts(receive),
                std::move(expected),
                {}};
    round.exchange = {
        .from = round.in.get().data, .to = round.out.get().data, .row_bytes = row_bytes};
    if (counts_on_device) {
      round.exchange.device_send_rows = round.send.get().as<int64_t>();
      round.exchange.device_receive_rows = round.receive.get().as<int64_t>();
    } else {
      std::ranges::copy(rows[place.rank()], round.exchange.send_rows);
      std::ranges::copy(receive, round.exchange.receive_rows);
    }
    rounds.push_back(std::move(round));
  }
  place.device.synchronize();
  place.group.barrier();  // taking memory may wait for kernels
  for (const Round& round : rounds)
    launch_ring_all_to_all(place.ring.view(), round.exchange, place.device.stream());
  place.device.synchronize();
  place.group.barrier();
  for (const Round& round : rounds)
    EXPECT_EQ(bytes_of(round.out), round.expected) << row_bytes << " bytes a row";
}

TEST_P(CudaRings, RowsReachTheirRanks) {
  run([](const Place& place) {
    check_all_to_all(place, 1, 1000, true);
    check_all_to_all(place, 4, 3000, false);
    check_all_to_all(place, 20, 700, true);
    check_all_to_all(place, 16, 5000, true);
    check_all_to_all(place, 4096, 300, true);
  });
}

/// More than all chunks of all channels hold.
TEST_P(CudaRings, RowsBeyondTheRoomOfTheRing) {
  run([](const Place& place) { check_all_to_all(place, 4096, 2500, true); });
}

Bf16 summand(int64_t rank, int64_t i) {
  return Bf16(static_cast<float>((i * 37 + rank * 101) % 509) / 7.0F - 30.0F);
}

/// `in_place`: the sum takes the place of this rank's own part.
void check_sum(const Place& place, const Counts& counts, bool in_place) {
  const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const int64_t before = std::accumulate(counts.begin(), counts.begin() + place.rank(), int64_t{0});
  const int64_t own = counts[place.rank()];
  const OwnedTensor in(DType::kBF16, {all}, "summands", place.device);
  {
    const HostTensor host(in, HostTensor::Access::kWrite);
    for (int64_t i = 0; i < all; ++i) host.get().as<Bf16>()[i] = summand(place.rank(), i);
    host.store();
  }
  const OwnedTensor apart(DType::kBF16, {own}, "sums", place.device);
  Bf16* const out = in_place ? in.get().as<Bf16>() + before : apart.get().as<Bf16>();
  RingSum sum{.from = in.get().data, .to = out};
  std::ranges::copy(counts, sum.counts);
  place.device.synchronize();
  place.group.barrier();
  launch_ring_sum(place.ring.view(), sum, place.device.stream());
  place.device.synchronize();
  place.group.barrier();
  const HostTensor host(in_place ? in : apart, HostTensor::Access::kRead);
  const Bf16* const found = host.get().as<Bf16>() + (in_place ? before : 0);
  int64_t wrong = 0;
  for (int64_t i = 0; i < own; ++i) {
    float expected = 0;
    for (int64_t r = 0; r < place.size(); ++r)
      expected += static_cast<float>(summand(r, before + i));
    wrong += found[i].bits != Bf16(expected).bits ? 1 : 0;
  }
  EXPECT_EQ(wrong, 0) << "of " << own;
  place.group.barrier();
}

TEST_P(CudaRings, SumsAreInTheOrderOfTheRanks) {
  run([](const Place& place) {
    std::mt19937_64 random(5);
    for (int round = 0; round < 6; ++round) {
      Counts counts;
      for (int64_t r = 0; r < place.size(); ++r) {
        const auto draw = static_cast<int64_t>(random() % 400'000);
        counts.push_back(draw % 5 == 0 ? draw % 3 : round % 2 == 0 ? draw / 8 * 8 : draw);
      }
      check_sum(place, counts, round % 3 == 0);
    }
  });
}

TEST_P(CudaRings, LargeSums) {
  run([](const Place& place) { check_sum(place, Counts(place.size(), int64_t{3} << 20), true); });
}

/// `values` of a type in the device's memory.
OwnedTensor numbers_on(CudaDevice& device, DType dtype, const std::vector<float>& values) {
  OwnedTensor tensor(dtype, {std::ssize(values)}, "numbers", device);
  const HostTensor host(tensor, HostTensor::Access::kWrite);
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) host.get().as<float>()[i] = values[i];
    if (dtype == DType::kBF16) host.get().as<Bf16>()[i] = Bf16(values[i]);
  }
  host.store();
  return tensor;
}

std::vector<float> numbers_of(const OwnedTensor& tensor) {
  const HostTensor host(tensor, HostTensor::Access::kRead);
  std::vector<float> values;
  for (int64_t i = 0; i < tensor.get().num_elements(); ++i) {
    values.push_back(tensor.get().dtype == DType::kF32
                         ? host.get().as<float>()[i]
                         : static_cast<float>(host.get().as<Bf16>()[i]));
  }
  return values;
}

/// Whole numbers, of which each rank has others: every sum of them is exact.
void check_whole_tensors(const Place& place, DType dtype, int64_t count) {
  std::vector<float> own;
  std::vector<float> sums;
  std::vector<float> all;
  for (int64_t i = 0; i < count; ++i) {
    own.push_back(static_cast<float>(i % 7 + place.rank()));
    const int64_t of_ranks = place.size() * (place.size() - 1) / 2;
    sums.push_back(static_cast<float>(place.size() * (i % 7) + of_ranks));
  }
  for (int64_t r = 0; r < place.size(); ++r) {
    for (int64_t i = 0; i < count; ++i) all.push_back(static_cast<float>(i % 7 + r));
  }
  const OwnedTensor in = numbers_on(place.device, dtype, own);
  const OwnedTensor in_place = numbers_on(place.device, dtype, own);
  const OwnedTensor apart = numbers_on(place.device, dtype, own);
  const OwnedTensor gathered = numbers_on(place.device, dtype, all);
  place.device.zero(gathered.get().data, gathered.get().num_bytes());
  place.device.synchronize();
  place.group.barrier();
  cudaStream_t const stream = place.device.stream();
  place.ring.all_reduce(in, apart, stream);
  place.ring.all_reduce(in_place, in_place, stream);
  place.ring.all_gather({in, gathered}, Counts(place.size(), count), stream);
  place.device.synchronize();
  place.group.barrier();
  EXPECT_EQ(numbers_of(apart), sums);
  EXPECT_EQ(numbers_of(in_place), sums);
  EXPECT_EQ(numbers_of(gathered), all);
  place.group.barrier();
}

TEST_P(CudaRings, WholeTensorsAreGatheredAndReduced) {
  run([](const Place& place) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t count : {1, 63, 320, 4099, 200'000})
        check_whole_tensors(place, dtype, count);
    }
  });
}

/// A rank that does not come: the others' kernels know for whom they wait, and end when told to.
TEST_P(CudaRings, KernelsEndWithoutARankThatDoesNotCome) {
  run([](const Place& place) {
    const OwnedTensor in(DType::kBF16, {place.size() * 64}, "summands", place.device);
    const OwnedTensor out(DType::kBF16, {64}, "sums", place.device);
    RingSum sum{.from = in.get().data, .to = out.get().data};
    std::fill_n(sum.counts, place.size(), 64);
    place.device.synchronize();
    place.group.barrier();
    if (place.rank() > 0) {
      launch_ring_sum(place.ring.view(), sum, place.device.stream());
      const auto begin = std::chrono::steady_clock::now();
      while (place.ring.waits_for() < 0 &&
             std::chrono::steady_clock::now() - begin < std::chrono::seconds(20))
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      EXPECT_EQ(place.ring.waits_for(), 0);
    }
    place.group.barrier();
    place.ring.abort();
    place.device.synchronize();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaRings, ::testing::Values(2, 3, 4, 8));

}  // namespace
}  // namespace tessera::cuda
