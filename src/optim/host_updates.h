#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/memory.h"
#include "core/tensor.h"
#include "optim/state_layout.h"

namespace tessera {

/// Optimizer state in the host's memory, which the host's threads update where it lies (Ren and
/// others, "ZeRO-Offload", 2021), and what passes between them and a device: a group's gradients
/// come, and its new weights go back. Both lie in one of two windows of pinned memory meanwhile,
/// which groups take in turn: while one is updated, the next one's gradients come and the last
/// one's weights go. A window's lane does all of that in the order in which it is given, so that
/// nobody waits for a window to be free. A group's parts are waited for on the device, in any
/// order; where one is not under way that is nothing. Not thread-safe.
class HostUpdates {
 public:
  /// Of parameters, whose memory must outlive it, kept in such formats, in the order of `groups`,
  /// each parameter in one. Throws OutOfMemory.
  HostUpdates(std::span<const Parameter> parameters, const StateFormats& formats,
              const UpdateGroups& groups, Device& device);
  ~HostUpdates();
  HostUpdates(const HostUpdates&) = delete;
  HostUpdates& operator=(const HostUpdates&) = delete;

  static size_t window_of(size_t group) { return group % kNumWindows; }
  /// Pinned memory for such groups.
  static int64_t window_bytes(std::span<const Parameter> parameters, const UpdateGroups& groups);
  int64_t window_bytes() const;
  /// What of a parameter comes before its update, and goes behind it.
  static int64_t bytes_in(const Parameter& parameter, const StateFormats& formats);
  static int64_t bytes_out(const Parameter& parameter) { return parameter.weight_bytes(); }

  /// All state; group after group.
  const Buffer& state() const { return state_; }
  /// Where a parameter's gradient and weight are in its group's window, of a weight in FP8 its
  /// scales too.
  const Tensor& grad(size_t parameter) const { return places_[parameter].grad; }
  const Tensor& weight(size_t parameter) const { return places_[parameter].weight; }
  const Tensor& scales(size_t parameter) const { return places_[parameter].scales; }
  /// A group's copy of what gradients are multiplied by, F32 [2], an AdamWGradScale.
  Tensor grad_scale(size_t group) const;

  /// Starts to bring a group's gradients, the weights that its update reads, and `grad_scale`, of
  /// the device's memory, after all work that the device was given.
  void store_gradients(size_t group, const Tensor& grad_scale);
  void wait_stored(size_t group);
  /// Starts its update behind that. One at a time is made, with all threads.
  void update(size_t group, std::function<void()> work);
  void wait_updated(size_t group);
  /// Starts to take its weights back behind that.
  void load_weights(size_t group);
  void wait_loaded(size_t group);

  /// Returns when nothing is under way: before the host reads or writes state or weights.
  void finish();
  /// Brings a group's weights, of which some updates read none, to its window; returns when they
  /// are there.
  void bring_weights(size_t group);

 private:
  static constexpr size_t kNumWindows = 2;
  using Tickets = std::vector<std::optional<CopyLane::Ticket>>;

  /// A parameter on the device, and in its group's window.
  struct Place {
    Parameter own;
    bool reads_weight = false;
    Tensor grad, weight, scales;
  };

  static int64_t passing_bytes(const Parameter& parameter);
  void place(size_t parameter, const Buffer& window, int64_t offset);
  CopyLane& lane(size_t group) { return *lanes_[window_of(group)]; }
  void join(Tickets& tickets, size_t group);
  void add_weights(size_t parameter, bool to_device, std::vector<CopyLane::Part>& parts) const;

  Device& device_;
  UpdateGroups groups_;
  Buffer state_;
  std::array<Buffer, kNumWindows> windows_;
  Buffer grad_scales_;
  std::vector<Place> places_;
  Tickets stored_, updated_, loaded_;  // under way, by group
  std::mutex at_work_;
  /// Before the memory that they use.
  std::array<std::unique_ptr<CopyLane>, kNumWindows> lanes_;
};

}  // namespace tessera
