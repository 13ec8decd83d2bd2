#include "checkpoint/snapshot.h"

#include <cstring>
#include <utility>

#include "core/out_of_memory.h"

namespace tessera {
namespace {

constexpr std::string_view kPurpose = "the copy that saves are written from";

}  // namespace

int64_t Snapshot::count_bytes(std::span<const NamedSlice> slices) {
  int64_t num_bytes = 0;
  for (const NamedSlice& slice : slices) num_bytes += align_up(slice.tensor.num_bytes());
  return num_bytes;
}

Snapshot::Snapshot(int64_t num_bytes, Device& device, StateHome home)
    : device_(device), home_(home) {
  allocate(num_bytes);
}

/// Pinned where it is for a device, if so much may be.
void Snapshot::allocate(int64_t num_bytes) {
  if (!device_.is_host()) {
    try {
      buffer_ = Buffer(num_bytes, kPurpose, device_, MemoryKind::kShared);
      lane_ = device_.make_copy_lane();
      joined_ = device_.make_event();
      return;
    } catch (const OutOfMemory&) {  // the host may still have it
    }
  }
  buffer_ = Buffer(num_bytes, kPurpose);
  // Now, so that the first save does not wait for the system to find the pages.
  if (num_bytes > 0) std::memset(buffer_.data(), 0, static_cast<size_t>(num_bytes));
}

void Snapshot::take(std::span<const NamedSlice> model, std::span<const NamedSlice> optimizer) {
  wait();
  *stall_ = 0;
  int64_t offset = 0;
  model_ = copy(model, lane_.get(), offset);
  const bool beside = home_ == StateHome::kDevice;
  optimizer_ = copy(optimizer, beside ? lane_.get() : nullptr, offset);
  // Between pinned and pinned memory the device may copy later.
  if (!beside) device_.synchronize();
  changes_ = under_way_.empty() ? kEnoughChanges : 0;
}

std::vector<NamedSlice> Snapshot::copy(std::span<const NamedSlice> slices, CopyLane* lane,
                                       int64_t& offset) {
  std::vector<NamedSlice> copies;
  for (const NamedSlice& slice : slices) {
    NamedSlice& copied = copies.emplace_back(slice);
    copied.tensor = buffer_.tensor(offset, slice.tensor.dtype, slice.tensor.shape);
    copy_to_host(slice.tensor, copied.tensor, lane);
    offset += align_up(slice.tensor.num_bytes());
  }
  return copies;
}

void Snapshot::copy_to_host(const Tensor& from, const Tensor& to, CopyLane* lane) {
  const int64_t num_bytes = from.num_bytes();
  if (num_bytes == 0) return;
  if (from.device == nullptr) {
    std::memcpy(to.data, from.data, static_cast<size_t>(num_bytes));
  } else if (lane != nullptr) {
    under_way_.push_back(lane->give(to.data, from.data, num_bytes));
  } else {
    from.device->copy(to.data, from.data, num_bytes);
  }
}

void Snapshot::before_change() {
  join();
  if (!done()) ++changes_;
}

void Snapshot::join() {
  if (under_way_.empty()) return;
  const Device::Mark begin = device_.mark();
  for (const CopyLane::Ticket copy : std::exchange(under_way_, {})) lane_->join(copy);
  device_.when_known(begin, device_.mark(), [stall = stall_](auto from, auto to) {
    *stall = std::chrono::duration<double>(to - from).count();
  });
  joined_->record();
}

double Snapshot::stall_seconds() {
  if (lane_) device_.synchronize();
  return *stall_;
}

void Snapshot::wait() {
  join();
  if (joined_) joined_->synchronize();
  changes_ = kEnoughChanges;
}

}  // namespace tessera
