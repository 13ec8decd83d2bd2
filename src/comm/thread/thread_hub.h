#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/options.h"

namespace tessera {

/// What one rank brings to an operation.
struct ThreadPost {
  Tensor in = {};
  Tensor out = {};
  ReduceOp op = ReduceOp::kSum;
  int64_t root = 0;
  std::vector<int64_t> rows = {};  ///< an all-to-all's send_rows
  std::vector<int64_t> receive_rows = {};
};

/// An operation to which several ranks come; who comes last carries it out. Protected by the hub's
/// mutex, except for `posts` while it runs.
struct ThreadOperation {
  CommKind kind = CommKind::kBarrier;  ///< kSend for a message
  int64_t number = 0;                  ///< of the group's collectives, or the two ranks' messages
  std::vector<int64_t> members;        ///< ranks in the group; of a message: sender, receiver
  std::vector<ThreadPost> posts;       ///< by member
  std::vector<bool> came;              ///< by member
  bool running = false;
  bool done = false;
};
using ThreadOperationPtr = std::shared_ptr<ThreadOperation>;

/// What the ranks of one group share; protected by the hub's mutex.
struct ThreadGroup {
  /// Messages from one rank to another.
  struct Channel {
    int64_t num_sent = 0;
    int64_t num_received = 0;
    std::map<int64_t, ThreadOperationPtr> waiting;  ///< by number: one side has come
  };

  std::string name;
  std::vector<int64_t> ranks;
  std::map<int64_t, ThreadOperationPtr> collectives;  ///< by number: some have come, not all
  std::map<std::pair<int64_t, int64_t>, Channel> channels;
};

/// What the ranks of a thread world share. Thread-safe. Ranks are those of the group unless said
/// otherwise.
class ThreadHub {
 public:
  ThreadHub(int64_t num_ranks, const CommOptions& options)
      : num_ranks_(num_ranks), options_(options) {}

  int64_t num_ranks() const { return num_ranks_; }
  /// The group that is the `instance`-th of this name and these ranks.
  std::shared_ptr<ThreadGroup> group(const std::string& name, const std::vector<int64_t>& ranks,
                                     int64_t instance);
  /// Brings `rank`'s part of collective `number`.
  ThreadOperationPtr collective(ThreadGroup& group, CommKind kind, int64_t number, int64_t rank,
                                ThreadPost post);
  /// Brings one side of the next message from `from` to `to`.
  ThreadOperationPtr message(ThreadGroup& group, int64_t from, int64_t to, bool is_send,
                             const Tensor& tensor);
  /// Throws CommError where another rank has failed or the time is over.
  void wait(const ThreadGroup& group, int64_t rank, const ThreadOperation& operation);
  bool done(const ThreadOperation& operation);
  /// Makes all waits and operations throw from now on. Only the first failure is kept, but that a
  /// rank gave up operations is replaced by its reason. The rank is the world's.
  void fail(int64_t world_rank, std::exception_ptr failure);
  /// Returns when `operation` is not running, and after it never will.
  void abandon(int64_t world_rank, const ThreadOperation& operation);
  /// The first failure, or null.
  std::exception_ptr failure();

 private:
  using Lock = std::unique_lock<std::mutex>;

  void check_kind(const ThreadGroup& group, const ThreadOperation& operation, CommKind kind,
                  int64_t rank);
  void come(Lock& lock, const ThreadGroup& group, const ThreadOperationPtr& operation,
            size_t member, ThreadPost post);
  void run(Lock& lock, const ThreadGroup& group, int64_t rank, ThreadOperation& operation);
  void fail_locked(int64_t world_rank, std::exception_ptr failure, bool only_gave_up = false);
  [[noreturn]] void give_up(const ThreadGroup& group, int64_t rank,
                            const ThreadOperation& operation, double seconds);

  const int64_t num_ranks_;
  const CommOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<std::string, std::vector<int64_t>>,
           std::map<int64_t, std::shared_ptr<ThreadGroup>>>
      groups_;
  std::exception_ptr failure_;
  std::string failure_text_;  ///< which rank failed, and how
  int64_t failed_rank_ = -1;
  bool only_gave_up_ = false;
};

}  // namespace tessera
