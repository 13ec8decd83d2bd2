#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "core/memory.h"
#include "program/memory_plan.h"

namespace tessera {

/// The memory of one run of a program. `tensors` is indexed by ValueId and holds every bound value
/// (inputs, weights, accumulators, outputs) at its bound; the slabs are at least as large as the
/// plan says and 64-byte aligned.
struct Bindings {
  std::vector<Tensor> tensors;
  std::byte* saved = nullptr;
  std::byte* transient = nullptr;
};

/// Called after each node with the seconds that its kernel took.
using NodeObserver = std::function<void(const Node&, double seconds)>;

/// A program made ready to run on the host's cores: kernels looked up, memory planned. Immutable,
/// so one object may run for many layers with different bindings; runs allocate nothing of the
/// program's own.
class CpuProgram {
 public:
  /// Keeps a copy of the program. `saved` are the intermediates that outlive a run. Throws
  /// InternalError where the table lacks a kernel.
  CpuProgram(Program program, const KernelTable& kernels, const std::vector<ValueId>& saved = {});

  const Program& program() const { return program_; }
  const MemoryPlan& plan() const { return plan_; }
  /// Bindings with every tensor unset.
  Bindings make_bindings() const;
  /// A value of a finished run, bound or saved, with ragged dims at their bounds.
  Tensor at_bound(const Bindings& bindings, ValueId id) const;
  /// The same at its actual extent.
  Tensor view(const Bindings& bindings, ValueId id) const;
  /// Runs all nodes in order. Throws InternalError where a bound value is missing or has the wrong
  /// type or shape, and what the kernels throw.
  void run(const Bindings& bindings, const NodeObserver& observer = {}) const;

 private:
  void check_bindings(const Bindings& bindings) const;
  void run_node(size_t idx, const Bindings& bindings) const;

  Program program_;
  MemoryPlan plan_;
  std::vector<Kernel> kernels_;
};

}  // namespace tessera
