#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/device.h"
#include "ops/operator.h"

namespace tessera {

/// Whether the work of programs that run again and again is recorded and replayed as a whole, where
/// the device can (Device::begin_recording).
enum class GraphMode : uint8_t {
  kAuto,  ///< where it can be recorded; what cannot is given as always, with a note
  kOn,    ///< what cannot be recorded is an error
  kOff,
};

/// How programs are given to a device, and what that took.
struct RunControl {
  GraphMode graphs = GraphMode::kAuto;
  /// Whether a run of a program first waits until the device has done all work before, so that
  /// giving it the program's never waits for room: for measurements.
  bool waits_before_programs = false;
  int64_t num_operators = 0;     ///< given to the device, one by one or in recorded work
  int64_t num_operations = 0;    ///< of the device, in the recorded work that was given
  double seconds = 0;            ///< that the host spent giving programs
  std::string why_not_recorded;  ///< of the first program that could not be
};

/// A second line of a device's work, for what leaves most of the device idle and is not needed at
/// once. Its work is done in the order in which it is given. Not thread-safe.
class SideLane {
 public:
  SideLane() = default;
  SideLane(const SideLane&) = delete;
  SideLane& operator=(const SideLane&) = delete;
  virtual ~SideLane() = default;

  /// Whether an operator of this cost is better done here than in the device's own order.
  virtual bool suits(const Cost& cost) const = 0;
  /// What kernels are given here: they share no memory with those of the device's own order.
  virtual KernelContext* context() const = 0;
  /// Calls `start`, which gives kernels with this context: they come after all work that the device
  /// was given before.
  virtual void give(const std::function<void()>& start) = 0;
  /// What the device is given from now on comes after all that was given here.
  virtual void join() = 0;
};

/// Where programs run: a device, the kernels of the operators on it, and what these share. Copies
/// are cheap and share all of it.
class Backend {
 public:
  /// The host with these kernels.
  Backend(KernelTable kernels);
  Backend(std::shared_ptr<Device> device, std::shared_ptr<KernelContext> context,
          KernelTable kernels, std::shared_ptr<SideLane> side = nullptr);

  Device& device() const { return *device_; }
  bool is_host() const { return device_->is_host(); }
  KernelContext* context() const { return context_.get(); }
  /// Null where there is none.
  SideLane* side_lane() const { return side_.get(); }
  /// Changes with what recorded work relies on: that of the contexts.
  int64_t kernel_version() const;
  /// Shared by all copies. What it counts is of a device alone, since the host does its work at
  /// once.
  RunControl& control() const { return *control_; }
  /// Throws InternalError where there is none.
  const Kernel& kernel(const Operator& op) const;
  /// Throws UserError where the operator's kernel does not compute with the format of one of these
  /// inputs or outputs, naming operator, format and back end.
  void check_formats(const Operator& op, std::span<const ValueType> types) const;
  /// Scratch memory of the operator's kernel.
  int64_t workspace_bytes(const Operator& op, std::span<const ValueType> inputs) const;

 private:
  std::shared_ptr<Device> device_;
  std::shared_ptr<KernelContext> context_;
  std::shared_ptr<SideLane> side_;
  std::shared_ptr<const KernelTable> kernels_;
  std::shared_ptr<RunControl> control_;
};

}  // namespace tessera
