#include "runtime/cuda/cuda_device.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "core/out_of_memory.h"
#include "core/pages/elastic_memory.h"
#include "core/random.h"
#include "ops/testing/gpu_test.h"
#include "runtime/cuda/cuda_upload.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class CudaDeviceTest : public GpuTest {
 protected:
  static Device& device() { return gpu().device(); }
  static std::vector<int> read(const Buffer& buffer) {
    std::vector<int> values(static_cast<size_t>(buffer.num_bytes()) / sizeof(int));
    device().copy(values.data(), buffer.data(), buffer.num_bytes());
    return values;
  }
};

/// Several times what the ring holds, from memory that changes as soon as it was given.
TEST_F(CudaDeviceTest, UploadsTakeTheBytesAtOnce) {
  constexpr int kUploads = 60;
  constexpr int64_t kMost = cuda::UploadRing::kMostBytes;
  Random random(3, 0);
  std::vector<int64_t> sizes = {0, 4, 64, kMost, kMost + 4, 3 * kMost};
  while (sizes.size() < kUploads)
    sizes.push_back(4 * static_cast<int64_t>(random.next_below(kMost / 4)));
  std::vector<Buffer> there;
  for (const int64_t size : sizes) there.emplace_back(size, "a test", device());
  std::vector<int> source(3 * kMost / sizeof(int));
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::iota(source.begin(), source.end(), static_cast<int>(i));
    device().upload(there[i].data(), source.data(), sizes[i]);
    std::ranges::fill(source, -1);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::vector<int> expected(static_cast<size_t>(sizes[i]) / sizeof(int));
    std::iota(expected.begin(), expected.end(), static_cast<int>(i));
    EXPECT_EQ(read(there[i]), expected) << "upload " << i;
  }
}

TEST_F(CudaDeviceTest, SmallUploadsDoNotWait) {
  const Buffer there(1024, "a test", device());
  const std::vector<int> source(256, 7);
  device().upload(there.data(), source.data(), 1024);
  const int64_t before = device().num_waits();
  for (int i = 0; i < 100; ++i) device().upload(there.data(), source.data(), 1024);
  EXPECT_EQ(device().num_waits(), before);
  EXPECT_EQ(read(there), source);
  EXPECT_EQ(device().num_waits(), before + 1);
}

/// Little and much, which comes another way: zeroed, and copied beside other work in both
/// directions.
TEST_F(CudaDeviceTest, PinnedMemoryIsZeroedAndCopied) {
  for (const int64_t bytes : {int64_t{100}, (int64_t{300} << 20) + 12}) {
    const Buffer pinned(bytes, "a test", device(), MemoryKind::kShared);
    EXPECT_EQ(std::to_integer<int>(pinned.data()[0]), 0);
    EXPECT_EQ(std::to_integer<int>(pinned.data()[bytes - 1]), 0);
    const Buffer own(bytes, "a test", device());
    std::memset(pinned.data(), 7, bytes);
    const auto lane = device().make_copy_lane();
    lane->join(lane->give(own.data(), pinned.data(), bytes));
    device().synchronize();
    std::memset(pinned.data(), 0, bytes);
    lane->join(lane->give(pinned.data(), own.data(), bytes));
    device().synchronize();
    EXPECT_EQ(std::to_integer<int>(pinned.data()[0]), 7);
    EXPECT_EQ(std::to_integer<int>(pinned.data()[bytes - 1]), 7);
  }
}

/// Addresses keep their place and content while more come to memory.
TEST_F(CudaDeviceTest, MemoryComesByPages) {
  const int64_t page = device().page_bytes();
  const int64_t before = device().used_bytes();
  constexpr int64_t kPages = 100'000;
  ElasticMemory memory(ElasticMemory::Kind::kByPage, kPages * page, "a test", device());
  EXPECT_LT(device().used_bytes() - before, kPages * page / 2);
  memory.commit(3 * page, 3 * page + 4);
  memory.commit(5 * page, 5 * page + 4);
  EXPECT_EQ(memory.committed_bytes(), 2 * page);
  const int value = 77;
  device().copy(memory.data() + 3 * page, &value, sizeof(value));
  ASSERT_TRUE(device().begin_recording());
  device().copy(memory.data() + 6 * page - 4, memory.data() + 3 * page, sizeof(value));
  const Recording recording = device().end_recording();
  ASSERT_TRUE(recording.work) << recording.why_not;
  memory.commit(2 * page, 7 * page);
  memory.commit(kPages * page - 1, kPages * page);
  EXPECT_EQ(memory.committed_bytes(), 6 * page);
  recording.work->run();
  device().zero(memory.data() + 4 * page, page);
  int found = 0;
  device().copy(&found, memory.data() + 6 * page - 4, sizeof(found));
  EXPECT_EQ(found, value);
}

/// What was recorded finds its addresses, whatever memory stands behind them.
TEST_F(CudaDeviceTest, PagesAreTakenBackAndComeAgain) {
  const int64_t page = device().page_bytes();
  ElasticMemory memory(ElasticMemory::Kind::kByPage, 64 * page, "a test", device());
  memory.commit(0, page);
  memory.keep();
  memory.commit(0, 20 * page);
  std::byte* const last = memory.data() + 20 * page - 4;
  const int value = 77;
  device().copy(memory.data(), &value, sizeof(value));
  ASSERT_TRUE(device().begin_recording());
  device().copy(last, memory.data(), sizeof(value));
  const Recording recording = device().end_recording();
  ASSERT_TRUE(recording.work) << recording.why_not;
  for (int64_t round = 1; round <= 3; ++round) {
    recording.work->run();
    const int64_t before = device().used_bytes();
    memory.leave(0, 64 * page, round);
    device().synchronize();
    for (const ElasticMemory::Piece& piece : memory.idle()) memory.take_back(piece);
    EXPECT_EQ(memory.committed_bytes(), page);
    EXPECT_EQ(device().used_bytes(), before - 19 * page);
    memory.commit(30 * page, 40 * page);  // so that other memory comes there
    memory.commit(0, 20 * page);
    device().zero(last, sizeof(value));
    recording.work->run();
    int found = 0;
    device().copy(&found, last, sizeof(found));
    EXPECT_EQ(found, value) << "round " << round;
    memory.leave(30 * page, 40 * page, round);
    device().synchronize();
    for (const ElasticMemory::Piece& piece : memory.idle()) memory.take_back(piece);
    EXPECT_EQ(memory.committed_bytes(), 20 * page);
  }
}

TEST_F(CudaDeviceTest, PagesThatCannotBeHadAreNamed) {
  const int64_t page = device().page_bytes();
  constexpr int64_t kPages = 200'000;  // 400 GB
  ElasticMemory memory(ElasticMemory::Kind::kByPage, kPages * page, "a test", device());
  EXPECT_THAT([&] { memory.commit(0, kPages * page); },
              ThrowsMessage<OutOfMemory>(AllOf(HasSubstr("for a test"), HasSubstr("are free"))));
  EXPECT_EQ(memory.committed_bytes(), 0);
  memory.commit(0, page);
  EXPECT_EQ(memory.committed_bytes(), page);
}

TEST_F(CudaDeviceTest, ReplaysWhatItRecorded) {
  const Buffer from(4096, "a test", device());
  const Buffer to(4096, "a test", device());
  const Buffer more(4096, "a test", device());
  const auto fill = [&](int value) {
    const std::vector<int> values(1024, value);
    device().copy(from.data(), values.data(), 4096);
  };
  fill(1);
  ASSERT_TRUE(device().begin_recording());
  device().copy(to.data(), from.data(), 4096);
  device().zero(from.data(), 2048);
  device().copy(more.data(), from.data(), 4096);
  const Recording recording = device().end_recording();
  ASSERT_TRUE(recording.work) << recording.why_not;
  EXPECT_EQ(recording.work->num_operations(), 3);
  EXPECT_EQ(read(to), std::vector<int>(1024, 0)) << "it was done, not recorded";
  for (const int value : {2, 3}) {
    fill(value);
    recording.work->run();
    EXPECT_EQ(read(to), std::vector<int>(1024, value));
    std::vector<int> half(1024, value);
    std::fill_n(half.begin(), 512, 0);
    EXPECT_EQ(read(more), half);
  }
}

/// Brings a buffer to the host's memory and back, with something else in it meanwhile.
class Travel {
 public:
  explicit Travel(Device& device)
      : device_(device), stores_(device.make_copy_lane()), reloads_(device.make_copy_lane()) {}

  void go(const Buffer& there, const Buffer& result) {
    const CopyLane::Ticket store = stores_->give(host_.data(), there.data(), there.num_bytes());
    stores_->join(store);
    device_.zero(there.data(), there.num_bytes());
    const CopyLane::Ticket first = reloads_->give(there.data(), host_.data(), kHalf);
    const CopyLane::Ticket second =
        reloads_->give(there.data() + kHalf, host_.data() + kHalf, kHalf);
    reloads_->join(first);
    reloads_->join(second);
    device_.copy(result.data(), there.data(), there.num_bytes());
  }

  static constexpr int64_t kHalf = 32 << 20;

 private:
  Device& device_;
  Buffer host_{2 * kHalf, "a test", device_, MemoryKind::kShared};
  std::unique_ptr<CopyLane> stores_, reloads_;
};

/// Work of the host on a lane comes behind the copies before it and before those behind it, beside
/// what the device does meanwhile.
TEST_F(CudaDeviceTest, TinyLanesHaveTheHostWork) {
  constexpr int64_t kCount = 1 << 16;
  const Buffer there(kCount * sizeof(int), "a test", device());
  const Buffer other(kCount * sizeof(int), "a test", device());
  const Buffer window(kCount * sizeof(int), "a test", device(), MemoryKind::kShared);
  const auto lane = device().make_copy_lane();
  std::vector<int> values(kCount);
  for (int round = 0; round < 3; ++round) {
    std::iota(values.begin(), values.end(), round);
    device().copy(there.data(), values.data(), there.num_bytes());
    const auto in = lane->give(window.data(), there.data(), there.num_bytes());
    const auto work = lane->give_work([data = reinterpret_cast<int*>(window.data())] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (int64_t i = 0; i < kCount; ++i) data[i] *= 2;
    });
    const auto out = lane->give(there.data(), window.data(), there.num_bytes());
    device().zero(other.data(), other.num_bytes());
    lane->join(in);
    lane->join(work);
    lane->join(out);
    for (int& value : values) value *= 2;
    EXPECT_EQ(read(there), values);
    EXPECT_EQ(read(other), std::vector<int>(kCount, 0));
  }
  ASSERT_TRUE(device().begin_recording());
  EXPECT_THROW(lane->give_work([] {}), InternalError);
  static_cast<void>(device().end_recording());
}

/// Copies on lanes come behind the device's work before them and before that behind their joins,
/// given one by one and in a recording.
TEST_F(CudaDeviceTest, LanesCopyInOrderWithTheDevice) {
  const Buffer there(2 * Travel::kHalf, "a test", device());
  const Buffer result(2 * Travel::kHalf, "a test", device());
  std::vector<int> values(static_cast<size_t>(there.num_bytes()) / sizeof(int));
  Travel travel(device());
  const auto fill = [&](int first) {
    std::iota(values.begin(), values.end(), first);
    device().copy(there.data(), values.data(), there.num_bytes());
  };
  for (int i = 0; i < 3; ++i) {
    fill(i);
    travel.go(there, result);
    EXPECT_EQ(read(result), values);
  }
  ASSERT_TRUE(device().begin_recording());
  travel.go(there, result);
  const Recording recording = device().end_recording();
  ASSERT_TRUE(recording.work) << recording.why_not;
  EXPECT_EQ(recording.work->num_operations(), 5);
  for (int i = 3; i < 6; ++i) {
    fill(i);
    recording.work->run();
    EXPECT_EQ(read(result), values);
  }
  fill(6);
  travel.go(there, result);
  EXPECT_EQ(read(result), values);
}

/// Small fills become kernels of the graph, as long as those that the runtime keeps and in any
/// form.
TEST_F(CudaDeviceTest, ReplaysFillsOfAnySize) {
  const Buffer bytes(1 << 20, "a test", device());
  const cudaStream_t stream = static_cast<cuda::CudaDevice&>(device()).stream();
  const auto at = [&](int64_t offset) { return bytes.data() + offset; };
  ASSERT_TRUE(device().begin_recording());
  device().zero(at(1), 3);
  device().zero(at(64), 40000);
  device().zero(at(50000), 70000);
  ASSERT_EQ(cudaMemset2DAsync(at(200001), 100, 7, 33, 5, stream), cudaSuccess);
  const Recording recording = device().end_recording();
  ASSERT_TRUE(recording.work) << recording.why_not;
  EXPECT_EQ(recording.work->num_operations(), 4);
  std::vector<std::byte> expected(1 << 20, std::byte{1});
  device().copy(bytes.data(), expected.data(), 1 << 20);
  const auto fill = [&](int64_t offset, int64_t count, int value) {
    std::fill_n(expected.begin() + offset, count, std::byte(value));
  };
  fill(1, 3, 0);
  fill(64, 40000, 0);
  fill(50000, 70000, 0);
  for (int row = 0; row < 5; ++row) fill(200001 + 100 * row, 33, 7);
  recording.work->run();
  std::vector<std::byte> found(1 << 20);
  device().copy(found.data(), bytes.data(), 1 << 20);
  EXPECT_TRUE(found == expected);
}

/// Small copies become kernels of the graph, which see what the host wrote before each run.
TEST_F(CudaDeviceTest, ReplaysCopiesOfAnySize) {
  constexpr int64_t kBytes = 200000;
  const Buffer given(kBytes, "a test", device(), MemoryKind::kShared);
  const Buffer there(kBytes, "a test", device());
  const Buffer again(kBytes, "a test", device());
  const Buffer back(kBytes, "a test", device(), MemoryKind::kShared);
  const std::pair<int64_t, int64_t> parts[] = {{0, 1},        {16, 4096},     {5001, 333},
                                               {8192, 40000}, {65536, 65535}, {131072, 65536}};
  ASSERT_TRUE(device().begin_recording());
  for (const auto& [offset, count] : parts) {
    device().copy(there.data() + offset, given.data() + offset, count);
    device().copy(again.data() + offset, there.data() + offset, count);
    device().copy(back.data() + offset, again.data() + offset, count);
  }
  const Recording recording = device().end_recording();
  ASSERT_TRUE(recording.work) << recording.why_not;
  EXPECT_EQ(recording.work->num_operations(), 18);
  std::vector<std::byte> expected(kBytes);
  for (int run = 1; run < 4; ++run) {
    for (int64_t i = 0; i < kBytes; ++i) given.data()[i] = std::byte((i * 7 + run * 31) % 251);
    for (const auto& [offset, count] : parts)
      std::copy_n(given.data() + offset, count, expected.begin() + offset);
    recording.work->run();
    device().synchronize();
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), back.data())) << run;
  }
}

/// Waiting cannot be recorded; what comes after works as always.
TEST_F(CudaDeviceTest, SaysWhyItCouldNotRecord) {
  const Buffer buffer(64, "a test", device());
  const std::vector<int> source(16, 7);
  ASSERT_TRUE(device().begin_recording());
  EXPECT_TRUE(device().is_recording());
  EXPECT_THROW(device().synchronize(), InternalError);
  EXPECT_THROW(device().upload(buffer.data(), source.data(), 64), InternalError);
  EXPECT_NE(cudaStreamSynchronize(static_cast<cuda::CudaDevice&>(device()).stream()), cudaSuccess);
  const Recording recording = device().end_recording();
  EXPECT_FALSE(recording.work);
  EXPECT_THAT(recording.why_not, HasSubstr("could not be recorded"));
  device().zero(buffer.data(), 64);
  EXPECT_NO_THROW(device().synchronize());
}

/// A recorded copy reads from where the host says when it is done, also while it may still be asked
/// for the one before, and whether or not bytes fill whole words.
TEST_F(CudaDeviceTest, FindsWhatARecordedCopyIsToRead) {
  for (const int64_t num_bytes : {4, 64, 1004, 1 << 20}) {
    const Buffer shared(64 + 2 * num_bytes, "a test", device(), MemoryKind::kShared);
    const Buffer to(num_bytes, "a test", device());
    auto** const word = reinterpret_cast<std::byte**>(shared.data());
    std::byte* const blocks = shared.data() + 64;
    std::fill_n(blocks, num_bytes, std::byte{1});
    std::fill_n(blocks + num_bytes, num_bytes, std::byte{2});
    *word = blocks;
    device().copy_found(to.data(), reinterpret_cast<const void* const*>(word), num_bytes);
    ASSERT_TRUE(device().begin_recording());
    device().copy_found(to.data(), reinterpret_cast<const void* const*>(word), num_bytes);
    const Recording recording = device().end_recording();
    ASSERT_TRUE(recording.work) << recording.why_not;
    for (const int block : {0, 1, 0}) {
      *word = blocks + block * num_bytes;
      device().zero(to.data(), num_bytes);
      recording.work->run();
      std::vector<std::byte> found(num_bytes);
      device().copy(found.data(), to.data(), num_bytes);
      EXPECT_EQ(std::ranges::count(found, std::byte{static_cast<unsigned char>(block + 1)}),
                num_bytes);
    }
  }
}

/// Work that takes the GPU some hundred microseconds.
void delay(Device& device, const Buffer& buffer) {
  for (int i = 0; i < 16; ++i) device.zero(buffer.data(), buffer.num_bytes());
}

TEST_F(CudaDeviceTest, TheHostWaitsForAnEventAlone) {
  const Buffer large(64 << 20, "a test", device());
  const Buffer given(64, "a test", device(), MemoryKind::kShared);
  const Buffer there(64, "a test", device());
  const std::vector<int> source(16, 7);
  device().copy(there.data(), source.data(), 64);
  const auto event = device().make_event();
  EXPECT_NO_THROW(event->synchronize()) << "never recorded";
  const int64_t before = device().num_waits();
  const double waited = device().waited_seconds();
  device().copy(given.data(), there.data(), 64);
  event->record();
  delay(device(), large);
  event->synchronize();
  EXPECT_GT(device().waited_seconds(), waited);
  EXPECT_EQ(given.tensor(0, DType::kI32, {16}).span<int32_t>()[15], 7);
  EXPECT_EQ(device().num_waits(), before + 1);
}

}  // namespace
}  // namespace tessera::testing
