#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/error.h"
#include "comm/options.h"
#include "comm/process_watch.h"
#include "comm/schedule.h"
#include "comm/termination.h"
#include "comm/transport.h"

namespace tessera {

/// The group of an operation.
struct ProcessGroup {
  std::string name;
  std::vector<int64_t> ranks;
  int64_t rank = 0;  ///< this rank's place
  std::unique_ptr<Channel> channel;
};

/// A schedule under way.
class Operation {
 public:
  /// `number` counts the group's collectives, or the messages between two ranks.
  Operation(std::shared_ptr<ProcessGroup> group, CommKind kind, int64_t number, Schedule schedule);

  bool done() const { return done_; }
  /// Takes all rounds that can be taken without waiting.
  void advance();
  /// What it waits for; time and reason are left out.
  FailedWait describe_wait() const;

 private:
  bool start_round();

  std::shared_ptr<ProcessGroup> group_;
  CommKind kind_;
  int64_t number_;
  Schedule schedule_;
  int64_t step_ = 0;
  Round round_;
  std::unique_ptr<Exchange> exchange_;
  bool done_ = false;
};

/// Moves the operations of one rank on. There is no thread behind it: whenever the rank starts,
/// tests or waits for one operation, all move on, so ranks may wait in different orders. Not
/// thread-safe.
class CommEngine {
 public:
  /// `termination` may be null: then SIGTERM means nothing to waits.
  CommEngine(std::shared_ptr<Transport> transport, std::unique_ptr<Termination> termination,
             const CommOptions& options);
  /// Ends the communication of all ranks unless this one failed or an exception is under way.
  ~CommEngine();
  CommEngine(const CommEngine&) = delete;
  CommEngine& operator=(const CommEngine&) = delete;

  Transport& transport() { return *transport_; }
  ScratchPool& scratch() { return scratch_; }
  /// Waits will end early where one of these processes has ended.
  void watch(const std::vector<ProcessName>& names) { watch_.emplace(names); }

  void start(std::shared_ptr<Operation> operation);
  /// Throws CommError. Yields the processor while waiting.
  void wait(const Operation& operation);
  bool test(const Operation& operation);
  /// A rank is gone, or SIGTERM came.
  bool job_ending();
  /// After it nothing touches the memory of operations any more.
  void give_up(const std::string& why) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void advance_all();
  void throw_if_failed() const;
  void check(const Operation& operation, Clock::time_point begin);
  std::string reason_to_give_up(Clock::time_point begin, Clock::time_point now);
  /// Which rank is gone, if any: the first that was seen to be, since others end because of it.
  const std::optional<std::string>& find_lost();

  std::shared_ptr<Transport> transport_;
  std::unique_ptr<Termination> termination_;
  const CommOptions options_;
  std::optional<ProcessWatch> watch_;
  std::optional<std::string> lost_;
  Clock::time_point lost_since_;
  Clock::time_point checked_ = Clock::now();  ///< when a wait was last looked at
  ScratchPool scratch_;
  std::vector<std::shared_ptr<Operation>> active_;
  std::string failure_;  ///< why this rank's communication failed; empty while it has not
};

}  // namespace tessera
