#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "program/row_plan.h"
#include "runtime/prepared_run.h"

namespace tessera {

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

class Exchanges;
class Executable;

/// Nodes of a program, one behind the other: a part of a run. The first part begins at 0, and the
/// last has no end.
struct RunPart {
  static constexpr int kToTheEnd = -1;
  int begin = 0;
  int end = kToTheEnd;

  bool is_first() const { return begin == 0; }
  bool is_last() const { return end == kToTheEnd; }
  bool operator==(const RunPart&) const = default;
};

/// A run part by part, between which other programs may run on other memory: what one part started
/// is under way until a later one needs it. Not under way beside another run of the same program.
/// What is under way is given up with it. REQUIRES that what it was made with outlives it.
class PartialRun {
 public:
  PartialRun(const Executable& program, const Bindings& bindings, const NodeObserver& observer);
  ~PartialRun();
  PartialRun(PartialRun&&) noexcept;
  PartialRun& operator=(PartialRun&&) noexcept;

  /// The nodes that come next, as Executable::run: up to before `end`, which is one of
  /// Executable::wait_points, or all that are left.
  void run_to(int end);

 private:
  void run_on_host(int last);
  void run_on_device(int last);

  struct State;
  std::unique_ptr<State> state_;
};

/// A program made ready to run on a back end: kernels looked up, memory planned. It never changes,
/// so one object may run for many layers with different bindings; runs allocate nothing of the
/// program's own. On a GPU a run gives the device its work and returns; what kernels are given is
/// kept for each of the bindings, and from the second run with them on the device replays what it
/// recorded (RunControl::graphs); where the device records already, a run becomes part of that, and
/// one that needs the host throws InternalError. Copies share that, and run on one thread at a
/// time.
class Executable {
 public:
  /// Keeps a copy of the program. `saved` are the intermediates that outlive a run, of which some
  /// may be `offloaded`; `told` are inputs that are extents which the host knows, and `expected`
  /// what all such inputs are where routing is balanced (see RowPlan).
  /// Throws UserError where the back end lacks a kernel, or one for the format of a value.
  Executable(Program program, const Backend& backend, const std::vector<ValueId>& saved = {},
             const std::map<ValueId, int64_t>& told = {},
             const std::vector<ValueId>& offloaded = {},
             const std::map<ValueId, int64_t>& expected = {});

  const Program& program() const { return program_; }
  const MemoryPlan& plan() const { return plan_; }
  const RowPlan& rows() const { return rows_; }
  const Backend& backend() const { return backend_; }
  /// Bindings with every tensor unset.
  Bindings make_bindings() const;
  /// A value of a finished run, bound or saved, with ragged dims at their bounds.
  Tensor at_bound(const Bindings& bindings, ValueId id) const;
  /// The same at its actual extent, which is read from the device.
  Tensor view(const Bindings& bindings, ValueId id) const;
  using MemoryUse = std::function<void(Storage storage, int64_t offset, int64_t num_bytes)>;
  /// Calls `use` for everything that a run wants in a slab, elastic values with `skew` times the
  /// rows that they have where routing is balanced.
  void list_memory(double skew, const MemoryUse& use) const;
  /// What of the offloaded slab a run on elastic slabs wrote.
  struct OffloadedRows {
    struct Part {
      int64_t offset = 0;
      int64_t num_bytes = 0;   ///< that were written
      int64_t read_bytes = 0;  ///< that may be read
    };
    std::vector<Part> parts;  ///< by offset; neighbours are one
    /// Extents there, by address (see ElasticSlabs::note_rows).
    std::vector<std::pair<const void*, int64_t>> extents;
  };
  /// REQUIRES that no other program ran since on these slabs.
  OffloadedRows find_offloaded(const Bindings& bindings) const;
  /// Gives elastic slabs that memory, so that a run asks for no more than what unbalanced routing
  /// needs. Throws OutOfMemory.
  void commit(const Bindings& bindings) const;
  /// The nodes in front of which something that was started is waited for, ascending: where it may
  /// pay to let others run.
  std::vector<int> wait_points() const;
  /// Runs all nodes in order. An exchange that a node starts is waited for just before the first
  /// node that needs it (find_waits), at the latest at the end of the run; so is a node that runs
  /// aside, except where nodes are observed. Throws InternalError where a bound value is missing or
  /// has the wrong type or shape, OutOfMemory where more rows came than there is memory for, and
  /// what the kernels throw. Observed nodes are given to the device one by one.
  void run(const Bindings& bindings, const NodeObserver& observer = {}) const;

 private:
  friend class PartialRun;
  void check_bindings(const Bindings& bindings) const;
  Tensor argument(const Bindings& bindings, const Node& node, ValueId id) const;
  /// Where so many rows of an elastic value lie: on the host as they came, on devices at the bound.
  std::vector<ByteRange> ranges_of(const ValueType& type, int64_t rows) const;
  int64_t find_rows(const Bindings& bindings, ValueId extent, RowCounts& rows) const;
  void commit_outputs(size_t idx, const Bindings& bindings, RowCounts& rows) const;
  const int64_t* extent_address(const Bindings& bindings, ValueId id) const;
  bool may_have_elements(const Bindings& bindings, const Node& node, ValueId id) const;
  std::vector<Tensor> begin_sums(size_t idx, const Bindings& bindings, std::vector<ValueId>& unset,
                                 bool& sets) const;
  KernelArgs make_args(size_t idx, const Bindings& bindings, std::vector<Tensor>& tensors,
                       std::vector<const int64_t*>& extents) const;
  Pending start_node(size_t idx, const KernelArgs& args) const;
  void run_aside(size_t idx, const KernelArgs& args, Exchanges& exchanges) const;
  void run_node(size_t idx, const KernelArgs& args, const std::vector<Tensor>& zeroed,
                Exchanges& exchanges, const NodeObserver& observer) const;
  void leave_transient(const Bindings& bindings) const;
  /// What a run keeps from node to node.
  struct HostRun {
    std::vector<ValueId> unset;
    RowCounts rows;
    std::vector<Tensor> tensors;  ///< of one node
    std::vector<const int64_t*> extents;
  };
  struct DeviceRun {
    PreparedRun* prepared = nullptr;
    bool graphs = false;
    RowCounts rows;
  };
  void run_on_host(const Bindings& bindings, size_t idx, HostRun& run, Exchanges& exchanges,
                   const NodeObserver& observer) const;
  void begin_on_device(const Bindings& bindings, DeviceRun& run,
                       const NodeObserver& observer) const;
  void run_segment(const Bindings& bindings, size_t idx, DeviceRun& run, Exchanges& exchanges,
                   const NodeObserver& observer) const;
  void end_on_device(DeviceRun& run) const;
  PreparedRun& prepare(const Bindings& bindings) const;
  void record(PreparedRun& run) const;
  Recording record_segment(const PreparedRun& run, const Segment& segment) const;

  Program program_;
  Backend backend_;
  MemoryPlan plan_;
  RowPlan rows_;
  std::vector<Kernel> kernels_;
  std::vector<int> waits_;
  std::vector<Segment> segments_;
  std::shared_ptr<PreparedRuns> prepared_;
};

}  // namespace tessera
