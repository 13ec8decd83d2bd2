#pragma once

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "runtime/bindings.h"

namespace tessera {

/// Neighbouring nodes of a program, given to a device together.
struct Segment {
  size_t begin = 0;
  size_t end = 0;
  bool recordable = true;  ///< none stands apart
};

/// Cuts a program around the nodes that stand apart, since they communicate or tell the host, and
/// before those that wait for one (`waits`, see find_waits). Both by node.
std::vector<Segment> cut_segments(const std::vector<bool>& apart, const std::vector<int>& waits);

/// What the host knows of extents in a run.
using RowCounts = std::map<ValueId, int64_t>;

/// A program's run on a device with certain bindings, made ready: what each kernel is given, and
/// the work that the device recorded.
struct PreparedRun {
  Bindings bindings;
  std::vector<Tensor> tensors;              ///< of all nodes, one after the other
  std::vector<const int64_t*> extents;      ///< likewise
  std::vector<KernelArgs> args;             ///< by node; views of the two
  std::vector<std::vector<Tensor>> zeroed;  ///< by node: accumulators that become zero before it
  std::vector<std::unique_ptr<RecordedWork>> recorded;  ///< by segment; null where there is none
  enum class State : uint8_t {
    kNew,       ///< never run: kernels may still make what they keep
    kRun,       ///< run once
    kRecorded,  ///< segments were recorded
    kPlain,     ///< cannot be recorded
  };
  State state = State::kNew;
  int64_t version = 0;  ///< of the kernels' context
  RowCounts rows;       ///< of its first run
  int64_t last_use = 0;
};

/// The prepared runs of one program, by their bindings: the kCapacity that were used last.
class PreparedRuns {
 public:
  static constexpr size_t kCapacity = 512;

  /// Null where the bindings are new.
  PreparedRun* find(const Bindings& bindings);
  PreparedRun& add(std::unique_ptr<PreparedRun> run);
  size_t size() const { return runs_.size(); }

 private:
  void drop_oldest();

  std::unordered_multimap<size_t, std::unique_ptr<PreparedRun>> runs_;  // by hash of bindings
  int64_t num_uses_ = 0;
};

}  // namespace tessera
