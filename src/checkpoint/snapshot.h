#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/device.h"
#include "core/memory.h"
#include "core/slice.h"

namespace tessera {

/// Host memory for a copy of all that a rank saves, taken once and filled again and again. What is
/// in a device's memory is copied on a lane of its own, beside the work that the device is given
/// next:
///
///   take();           the copies are under way
///   ...               work that only reads what is copied
///   before_change();  what changes it comes behind the copies
///   ...               that work, and the host learns that it is done; in a loop, the same again
///   if (done()) ...   the copies are there; or wait()
///
/// Where the system does not let so much memory be pinned, it is memory as any, and take() returns
/// when the copies are there. Not thread-safe. The device must outlive it.
class Snapshot {
 public:
  /// What it takes for these tensors, with each at an aligned place.
  static int64_t count_bytes(std::span<const NamedSlice> slices);

  /// Where the optimizer's tensors are that a device's work reads and writes.
  enum class StateHome : uint8_t { kDevice, kPinned };

  /// Throws OutOfMemory.
  explicit Snapshot(int64_t num_bytes, Device& device = host_device(),
                    StateHome home = StateHome::kDevice);
  /// Returns when nobody writes to its memory any more.
  ~Snapshot() = default;
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Whether copies of a device's memory go on beside its work.
  bool copies_beside() const { return lane_ != nullptr; }

  /// Starts to copy all, from wherever they are, when earlier copies are there; what is in the
  /// host's memory is copied when it returns. Throws InternalError where the memory is less.
  void take(std::span<const NamedSlice> model, std::span<const NamedSlice> optimizer);
  /// What the device is given from now on comes after the copies. Called each time before it is
  /// given what may change tensors.
  void before_change();
  /// Whether they are there, as far as can be told without a wait for the device: where it was
  /// given changes twice, the host has learnt of the first.
  bool done() const { return changes_ >= kEnoughChanges; }
  /// Returns when they are there.
  void wait();
  /// How long the device's work waited for the last copies. Waits for the device.
  double stall_seconds();
  /// The copies, which stay until the next take().
  std::span<const NamedSlice> model() const { return model_; }
  std::span<const NamedSlice> optimizer() const { return optimizer_; }
  int64_t num_bytes() const { return buffer_.num_bytes(); }

 private:
  static constexpr int kEnoughChanges = 2;

  void allocate(int64_t num_bytes);
  std::vector<NamedSlice> copy(std::span<const NamedSlice> slices, CopyLane* lane, int64_t& offset);
  void copy_to_host(const Tensor& from, const Tensor& to, CopyLane* lane);
  void join();

  Device& device_;
  const StateHome home_;
  Buffer buffer_;
  std::unique_ptr<CopyLane> lane_;  ///< null where copies are there when they were given
  std::unique_ptr<DeviceEvent> joined_;
  std::vector<CopyLane::Ticket> under_way_;
  std::shared_ptr<double> stall_ = std::make_shared<double>(0);  ///< the device tells it
  int changes_ = kEnoughChanges;  ///< that the device was given since copies began
  std::vector<NamedSlice> model_;
  std::vector<NamedSlice> optimizer_;
};

}  // namespace tessera
