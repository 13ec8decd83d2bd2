#include "optim/state_windows.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/limits.h"
#include "core/out_of_memory.h"

namespace tessera {
namespace {

std::vector<int64_t> list_begins(const std::vector<int64_t>& group_bytes) {
  std::vector<int64_t> begins = {0};
  for (const int64_t bytes : group_bytes) begins.push_back(begins.back() + bytes);
  return begins;
}

/// Copies between pinned memory and a device need nobody's help.
Buffer allocate_on_host(int64_t num_bytes, Device& device) {
  try {
    return {num_bytes, "offloaded optimizer state", device, MemoryKind::kShared};
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(
        fmt::format("{}, or fewer bits for the state (optim.first_moment, second_moment, master); "
                    "{}",
                    error.what(), describe_lockable_memory()));
  }
}

/// The most bytes that a window has to hold.
int64_t largest(const std::vector<int64_t>& group_bytes, size_t window) {
  int64_t bytes = 0;
  for (size_t group = 0; group < group_bytes.size(); ++group) {
    if (StateWindows::window_of(group) == window) bytes = std::max(bytes, group_bytes[group]);
  }
  return bytes;
}

}  // namespace

StateWindows::StateWindows(const std::vector<int64_t>& group_bytes, Device& device)
    : device_(device),
      begins_(list_begins(group_bytes)),
      host_(allocate_on_host(begins_.back(), device)),
      in_(device.make_copy_lane()),
      out_(device.make_copy_lane()),
      loads_(group_bytes.size()),
      stores_(group_bytes.size()) {
  for (size_t window = 0; window < kNumWindows; ++window)
    windows_[window] =
        Buffer(largest(group_bytes, window), "optimizer state that is updated", device);
}

StateWindows::~StateWindows() = default;

int64_t StateWindows::window_bytes(const std::vector<int64_t>& group_bytes) {
  int64_t bytes = 0;
  for (size_t window = 0; window < kNumWindows; ++window) bytes += largest(group_bytes, window);
  return bytes;
}

void StateWindows::load(size_t group) {
  ensure(!loads_.at(group) && !stores_[group], "optimizer state: group {} is on its way already",
         group);
  loads_[group] = in_->give(windows_[window_of(group)].data(), host_data(group), num_bytes(group));
}

void StateWindows::wait_load(size_t group) {
  ensure(loads_.at(group).has_value(), "optimizer state: group {} is waited for and not on its way",
         group);
  in_->join(*std::exchange(loads_[group], std::nullopt));
}

void StateWindows::store(size_t group) {
  ensure(!loads_.at(group) && !stores_[group], "optimizer state: group {} is on its way already",
         group);
  stores_[group] =
      out_->give(host_data(group), windows_[window_of(group)].data(), num_bytes(group));
}

void StateWindows::wait_store(size_t group) {
  ensure(stores_.at(group).has_value(),
         "optimizer state: group {} is waited for and not on its way", group);
  out_->join(*std::exchange(stores_[group], std::nullopt));
}

void StateWindows::forget() {
  std::ranges::fill(loads_, std::nullopt);
  std::ranges::fill(stores_, std::nullopt);
}

Tensor StateWindows::in_window(const Tensor& tensor, size_t group) const {
  Tensor result = tensor;
  result.data = windows_[window_of(group)].data() +
                (static_cast<const std::byte*>(tensor.data) - host_data(group));
  result.device = device_.is_host() ? nullptr : &device_;
  return result;
}

}  // namespace tessera
