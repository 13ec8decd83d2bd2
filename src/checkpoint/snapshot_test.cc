#include "checkpoint/snapshot.h"

#include <gtest/gtest.h>

#include <cstring>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/testing.h"
#include "core/error.h"
#include "core/testing/host_like_device.h"

namespace tessera {
namespace {

/// A device whose copies on lanes are made when they are joined, and whose host lets at most some
/// bytes be pinned at a time.
class PinningDevice final : public testing::HostLikeDevice {
 public:
  explicit PinningDevice(int64_t most_pinned) : most_pinned_(most_pinned) {}

  std::string name() const override { return "pinning"; }
  bool is_host() const override { return false; }
  std::byte* allocate_shared(int64_t num_bytes) override {
    if (pinned_ + num_bytes > most_pinned_) return nullptr;
    pinned_ += num_bytes;
    most_seen_ = std::max(most_seen_, pinned_);
    return allocate(num_bytes);
  }
  void release_shared(std::byte* data, int64_t num_bytes) noexcept override {
    pinned_ -= num_bytes;
    release(data, num_bytes);
  }
  std::unique_ptr<CopyLane> make_copy_lane() override { return std::make_unique<Lane>(); }

  int64_t pinned() const { return pinned_; }
  int64_t most_seen() const { return most_seen_; }

 private:
  class Lane final : public CopyLane {
   public:
    Ticket give_parts(std::span<const Part> parts) override {
      copies_.push_back([given = std::vector(parts.begin(), parts.end())] {
        for (const Part& part : given)
          std::memcpy(part.to, part.from, static_cast<size_t>(part.num_bytes));
      });
      return std::ssize(copies_) - 1;
    }
    Ticket give_work(std::function<void()> work) override {
      copies_.push_back(std::move(work));
      return std::ssize(copies_) - 1;
    }
    void join(Ticket copy) override { copies_.at(copy)(); }

   private:
    std::vector<std::function<void()>> copies_;
  };

  int64_t most_pinned_;
  int64_t pinned_ = 0;
  int64_t most_seen_ = 0;
};

class Values {
 public:
  explicit Values(Device& device) : tensor_(DType::kF32, {5, 3}, "values", device) { set(1); }
  void set(int fill) const {
    std::memset(tensor_.get().data, fill, static_cast<size_t>(tensor_.get().num_bytes()));
  }
  std::vector<NamedSlice> slices() const { return {{"w", tensor_, Slice::whole({5, 3})}}; }

 private:
  OwnedTensor tensor_;
};

bool holds(std::span<const NamedSlice> copies, int fill) {
  bool all = true;
  for (const NamedSlice& copy : copies) {
    EXPECT_EQ(copy.tensor.device, nullptr);
    const auto* bytes = static_cast<const std::byte*>(copy.tensor.data);
    for (int64_t i = 0; i < copy.tensor.num_bytes(); ++i) all &= bytes[i] == std::byte(fill);
  }
  return all;
}

TEST(Snapshot, OfADeviceIsThereBehindTheChangeThatWaitsForIt) {
  PinningDevice device(1 << 20);
  const Values values(device);
  Snapshot snapshot(1024, device);
  EXPECT_TRUE(snapshot.copies_beside());
  EXPECT_TRUE(snapshot.done());
  for (int round = 1; round < 4; ++round) {
    values.set(round);
    snapshot.take(values.slices(), values.slices());
    EXPECT_FALSE(snapshot.done());
    EXPECT_FALSE(holds(snapshot.model(), round));
    snapshot.before_change();
    values.set(0x7f);
    EXPECT_FALSE(snapshot.done());  // the host may not know
    snapshot.before_change();
    EXPECT_TRUE(snapshot.done());
    EXPECT_TRUE(holds(snapshot.model(), round));
    EXPECT_TRUE(holds(snapshot.optimizer(), round));
  }
  EXPECT_GE(snapshot.stall_seconds(), 0);
}

TEST(Snapshot, MayBeWaitedForAndTakenAgainAtAnyTime) {
  PinningDevice device(1 << 20);
  const Values values(device);
  Snapshot snapshot(1024, device);
  snapshot.take(values.slices(), {});
  snapshot.wait();
  EXPECT_TRUE(snapshot.done());
  EXPECT_TRUE(holds(snapshot.model(), 1));
  values.set(2);
  snapshot.take(values.slices(), {});
  values.set(3);  // whoever forgets to say so
  snapshot.take(values.slices(), {});
  snapshot.before_change();
  EXPECT_TRUE(holds(snapshot.model(), 3));
}

/// Such memory is copied in the device's order, not by the lane.
TEST(Snapshot, OfStateInPinnedMemoryIsThereAtOnce) {
  PinningDevice device(1 << 20);
  const Values values(device);
  Snapshot snapshot(1024, device, Snapshot::StateHome::kPinned);
  snapshot.take({}, values.slices());
  EXPECT_TRUE(snapshot.done());
  EXPECT_TRUE(holds(snapshot.optimizer(), 1));
}

TEST(Snapshot, IsPageableWhereNotSoMuchCanBePinned) {
  PinningDevice device(1000);
  const Values values(device);
  {
    Snapshot snapshot(1024, device);
    EXPECT_FALSE(snapshot.copies_beside());
    EXPECT_EQ(device.pinned(), 0);
    snapshot.take(values.slices(), values.slices());
    EXPECT_TRUE(snapshot.done());
    EXPECT_TRUE(holds(snapshot.model(), 1));
  }
  const Snapshot small(1000, device);
  EXPECT_TRUE(small.copies_beside());
  EXPECT_EQ(device.pinned(), 1000);
}

TEST(Snapshot, OfTheHostIsThereAtOnce) {
  const Values values(host_device());
  Snapshot snapshot(1024);
  snapshot.take(values.slices(), {});
  EXPECT_TRUE(snapshot.done());
  EXPECT_TRUE(holds(snapshot.model(), 1));
  EXPECT_FALSE(snapshot.copies_beside());
}

TEST(Snapshot, ThatIsTooSmallIsABug) {
  PinningDevice device(1 << 20);
  const Values values(device);
  Snapshot snapshot(64, device);
  EXPECT_THROW(snapshot.take(values.slices(), values.slices()), InternalError);
}

using StreamedFile = FolderTest;

/// A device's tensors go to the disk by way of one block, however many bytes they are.
TEST_F(StreamedFile, TakesOneBlockOfTheHostsMemory) {
  constexpr int64_t kBlock = int64_t{64} << 20;
  PinningDevice device(kBlock);
  const OwnedTensor large(DType::kU8, {3 * kBlock / 2 + 17}, "large", device);
  const OwnedTensor small(DType::kF32, {7}, "small", device);
  std::memset(large.get().data, 5, static_cast<size_t>(large.get().num_bytes()));
  const std::vector<NamedTensor> tensors = {{"large", large}, {"small", small}};
  write_safetensors(folder_ / "file", tensors);
  EXPECT_EQ(device.most_seen(), kBlock);
  EXPECT_EQ(device.pinned(), 0);
  const SafetensorsReader reader(folder_ / "file");
  const OwnedTensor read(DType::kU8, large.get().shape);
  reader.read("large", read);
  EXPECT_TRUE(same_bits(read, large));
}

}  // namespace
}  // namespace tessera
