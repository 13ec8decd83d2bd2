#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "optim/optimizer.h"
#include "runtime/executable.h"
#include "step/run/step_runner.h"

namespace tessera {

/// Records what a rank did when, for the trace viewers that read Chrome's JSON (Perfetto,
/// chrome://tracing). Each rank is a process there, with a row of steps, one of their tasks, one of
/// computation, and for each group and kind of communication as many as were under way at a time:
/// there, a communication reaches from its start to where the rank saw that it was complete, and
/// between GPUs from where its stream came to it to its end on the GPU. Not thread-safe.
class TraceRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  /// Times are counted from `origin`.
  explicit TraceRecorder(Clock::time_point origin) : origin_(origin) {}
  ~TraceRecorder() { stop_watching(); }
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  /// Records the communications that the rank with these statistics starts from now on and
  /// completes while the recorder lives. The statistics must outlive it, and are watched by one
  /// recorder at a time.
  void watch(CommStatistics& statistics);

  /// To be given to whatever runs programs; the recorder must outlive its use.
  NodeObserver observer();
  /// The same for the tasks of steps.
  TaskObserver task_observer();
  /// The same for the optimizer's operators.
  UpdateObserver update_observer();
  /// Something else that took time: a step.
  void add(const std::string& name, Clock::time_point begin, Clock::time_point end);
  size_t num_events() const { return events_.size(); }
  /// In the order in which they were complete.
  const std::vector<CommEvent>& communications() const { return communications_; }
  Clock::time_point origin() const { return origin_; }

  /// The events as JSON objects, separated by commas; `rank` is their process.
  std::string to_json(int64_t rank) const;

 private:
  enum class Row : uint8_t { kSteps, kTasks, kComputation, kHostUpdates };
  struct Event {
    std::string name;
    std::string program;
    std::string attributes;
    Row row = Row::kComputation;
    double begin = 0;  ///< microseconds
    double duration = 0;
  };
  struct Communication {
    CommEvent event;
    int64_t row = 0;
  };

  void add(const NodeEvent& event);
  void stop_watching();
  double microseconds(Clock::time_point time) const;
  /// Gives communications rows, counted from `first_row`, in which they do not overlap; the names
  /// of the rows.
  std::vector<std::string> place_communications(int64_t first_row,
                                                std::vector<Communication>& placed) const;

  Clock::time_point origin_;
  std::vector<Event> events_;
  std::vector<CommEvent> communications_;
  CommStatistics* watched_ = nullptr;
};

/// Writes the events of all ranks into one file. All ranks call; rank 0 writes. Throws UserError
/// where it cannot.
void write_trace(const TraceRecorder& recorder, const std::filesystem::path& file,
                 Communicator& world);

}  // namespace tessera
