#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/memory.h"
#include "core/tensor.h"

namespace tessera {

/// Optimizer state in the host's memory, pinned where a device copies it, and two windows of the
/// device's memory in which groups of parameters are updated: while one group's state is updated,
/// the next one's comes and the last one's goes (Rajbhandari and others, "ZeRO-Infinity", 2021,
/// section 5.2.2). A group's state is one run of bytes. Not thread-safe.
class StateWindows {
 public:
  /// `group_bytes` of each group, multiples of kAlignment.
  StateWindows(const std::vector<int64_t>& group_bytes, Device& device);
  ~StateWindows();
  StateWindows(const StateWindows&) = delete;
  StateWindows& operator=(const StateWindows&) = delete;

  /// The window that a group is updated in, and so which groups must come one after the other.
  static size_t window_of(size_t group) { return group % kNumWindows; }
  /// Device memory for such groups.
  static int64_t window_bytes(const std::vector<int64_t>& group_bytes);

  /// Starts to bring a group's state after all work that the device was given, and waits for it on
  /// the device. REQUIRES that what was stored from its window is waited for.
  void load(size_t group);
  void wait_load(size_t group);
  /// Starts to take it back after all work that the device was given, and waits likewise.
  void store(size_t group);
  void wait_store(size_t group);

  /// After a step that did not come to its end: what was under way is nobody's.
  void forget();

  /// All state, where the host reaches it; group after group.
  const Buffer& host() const { return host_; }
  int64_t window_bytes() const { return windows_[0].num_bytes() + windows_[1].num_bytes(); }
  /// Where a group's tensor of host() is in its window.
  Tensor in_window(const Tensor& tensor, size_t group) const;

 private:
  static constexpr size_t kNumWindows = 2;

  std::byte* host_data(size_t group) const { return host_.data() + begins_[group]; }
  int64_t num_bytes(size_t group) const { return begins_[group + 1] - begins_[group]; }

  Device& device_;
  std::vector<int64_t> begins_;  ///< of each group in host(), and the end of the last
  Buffer host_;
  std::array<Buffer, kNumWindows> windows_;
  std::unique_ptr<CopyLane> in_, out_;
  std::vector<std::optional<CopyLane::Ticket>> loads_, stores_;  ///< under way, by group
};

}  // namespace tessera
