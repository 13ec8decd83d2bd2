#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "core/memory.h"
#include "ops/backend.h"
#include "program/memory_plan.h"

namespace tessera {

/// The memory of one run of a program. `tensors` is indexed by ValueId and holds every bound value
/// (inputs, weights, accumulators, outputs) at its bound; the slabs are at least as large as the
/// plan says and 64-byte aligned.
struct Bindings {
  std::vector<Tensor> tensors;
  std::byte* saved = nullptr;
  std::byte* transient = nullptr;
  /// Accumulators that hold nothing yet, rather than a sum to add to.
  std::vector<ValueId> unset;
};

/// What the interpreter did from `begin` to `end`. An exchange that a node started is under way
/// from its kStart to its kWait, which always comes, in the same run.
struct NodeEvent {
  enum class Phase : uint8_t {
    kRun,    ///< a kernel, from its start to its end
    kStart,  ///< an exchange was started
    kWait,   ///< an exchange was waited for
  };
  const Program& program;
  const Node& node;
  Phase phase = Phase::kRun;
  std::chrono::steady_clock::time_point begin;
  std::chrono::steady_clock::time_point end;

  double seconds() const { return std::chrono::duration<double>(end - begin).count(); }
};

/// Called after each event, on the thread that runs the program; on a GPU when the device is next
/// synchronised, with the times at which it did the work.
using NodeObserver = std::function<void(const NodeEvent&)>;

/// A program made ready to run on a back end: kernels looked up, memory planned. Immutable, so one
/// object may run for many layers with different bindings; runs allocate nothing of the program's
/// own. On a GPU a run gives the device its work and returns.
class Executable {
 public:
  /// Keeps a copy of the program. `saved` are the intermediates that outlive a run. Throws
  /// UserError where the back end lacks a kernel.
  Executable(Program program, const Backend& backend, const std::vector<ValueId>& saved = {});

  const Program& program() const { return program_; }
  const MemoryPlan& plan() const { return plan_; }
  const Backend& backend() const { return backend_; }
  /// Bindings with every tensor unset.
  Bindings make_bindings() const;
  /// A value of a finished run, bound or saved, with ragged dims at their bounds.
  Tensor at_bound(const Bindings& bindings, ValueId id) const;
  /// The same at its actual extent, which is read from the device.
  Tensor view(const Bindings& bindings, ValueId id) const;
  /// Runs all nodes in order. An exchange that a node starts is waited for just before the first
  /// node that needs it (find_waits), at the latest at the end of the run. Throws InternalError
  /// where a bound value is missing or has the wrong type or shape, and what the kernels throw.
  void run(const Bindings& bindings, const NodeObserver& observer = {}) const;

 private:
  void check_bindings(const Bindings& bindings) const;
  Tensor argument(const Bindings& bindings, const Node& node, ValueId id) const;
  const int64_t* extent_address(const Bindings& bindings, ValueId id) const;
  bool begin_sums(size_t idx, const Bindings& bindings, std::vector<ValueId>& unset) const;
  Pending start_node(size_t idx, const Bindings& bindings, bool set_accumulators) const;

  Program program_;
  Backend backend_;
  MemoryPlan plan_;
  std::vector<Kernel> kernels_;
  std::vector<int> waits_;
};

}  // namespace tessera
