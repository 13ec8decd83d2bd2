#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "runtime/executable.h"

namespace tessera {

/// Records what a rank did when, for the trace viewers that read Chrome's JSON (Perfetto,
/// chrome://tracing). Each rank is a process there, with a row of computation and one of exchanges
/// under way. Not thread-safe.
class TraceRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  /// Times are counted from `origin`.
  explicit TraceRecorder(Clock::time_point origin) : origin_(origin) {}

  /// To be given to whatever runs programs; the recorder must outlive its use.
  NodeObserver observer();
  /// Something else that took time: a step, an update.
  void add(const std::string& name, Clock::time_point begin, Clock::time_point end);
  size_t num_events() const { return events_.size(); }

  /// The events as JSON objects, separated by commas; `rank` is their process.
  std::string to_json(int64_t rank) const;

 private:
  enum class Row : uint8_t { kSteps, kComputation, kExchanges };
  struct Event {
    std::string name;
    std::string program;
    std::string attributes;
    Row row = Row::kComputation;
    double begin = 0;  ///< microseconds
    double duration = 0;
  };

  void add(const NodeEvent& event);
  double microseconds(Clock::time_point time) const;

  Clock::time_point origin_;
  std::vector<Event> events_;
  std::vector<std::pair<const Node*, Clock::time_point>> started_;
};

/// Writes the events of all ranks into one file. All ranks call; rank 0 writes. Throws UserError
/// where it cannot.
void write_trace(const TraceRecorder& recorder, const std::filesystem::path& file,
                 Communicator& world);

}  // namespace tessera
