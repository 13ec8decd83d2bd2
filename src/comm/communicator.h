#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/statistics.h"
#include "core/tensor.h"

namespace tessera {

enum class ReduceOp : uint8_t { kSum, kMax };

/// An operation under way in a back end.
class Work {
 public:
  virtual ~Work() = default;
  /// Returns when the operation is complete on this rank. Throws CommError (see comm/error.h) where
  /// a peer is lost or the time limit passes.
  virtual void wait() = 0;
  virtual bool done() = 0;
  /// Gives the operation up because an exception is under way: afterwards nothing touches its
  /// tensors, this rank's communication has failed, and its peers learn that where they can.
  virtual void abandon() noexcept = 0;
};

/// A started operation: its tensors must live, and outputs must not be read, until wait() returned.
/// Move-only; the destructor waits, so that memory is never written after it was given back. While
/// an exception unwinds it abandons the operation instead, which fails this rank's communication.
class Pending {
 public:
  Pending() = default;  ///< already complete
  explicit Pending(std::unique_ptr<Work> work) : work_(std::move(work)) {}
  Pending(Pending&&) = default;
  Pending& operator=(Pending&& other) noexcept;
  ~Pending();

  void wait();
  bool done();

 private:
  friend class Communicator;  // which puts observed work around a back end's
  std::unique_ptr<Work> work_;
};

/// Of which an operation on rows moves as many from `in` to `out` as it says. Several of them, such
/// as elements and their scales, are moved by one operation.
struct RowMove {
  Tensor in;
  Tensor out;
};
using RowMoves = std::span<const RowMove>;

/// The ranks that communicate with one another, seen from one of them. Every member must start the
/// same operations in the same order. Operations move raw bytes of contiguous tensors; kinds that
/// reduce take F32, BF16 (summed in F32, rounded once), F64, I32 and I64. Rows are along the first
/// dim; a buffer may have more than the rows that an operation moves where rows are given. An
/// all-gather's in may be its part of out, and a reduce-scatter's out its part of in. Not
/// thread-safe.
///
/// The base class checks shapes (InternalError), answers groups of one rank by copying, and counts
/// calls and bytes, and tells whoever observes (CommStatistics); back ends implement the do_
/// functions.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// What the group is for: "tp", "ep", ... Used in messages and statistics.
  const std::string& name() const { return name_; }
  int64_t size() const { return std::ssize(ranks_); }
  /// This rank's place in the group.
  int64_t rank() const { return rank_; }
  /// The members' ranks in the world, in the group's order.
  const std::vector<int64_t>& ranks() const { return ranks_; }

  /// in [n, ...] of each rank -> out [size·n, ...], in the order of the ranks.
  [[nodiscard]] Pending all_gather(const Tensor& in, const Tensor& out);
  [[nodiscard]] Pending all_gather(RowMoves moves);
  /// The same with rows[i] rows from rank i, one rank's after the other's without gaps; `rows` is
  /// the same on all ranks.
  [[nodiscard]] Pending all_gather_v(const Tensor& in, const Tensor& out,
                                     std::span<const int64_t> rows);
  [[nodiscard]] Pending all_gather_v(RowMoves moves, std::span<const int64_t> rows);
  /// in [size·n, ...] -> out [n, ...]: part i of all ranks' inputs, summed, goes to rank i.
  [[nodiscard]] Pending reduce_scatter(const Tensor& in, const Tensor& out);
  /// The same with rows[i] rows for rank i.
  [[nodiscard]] Pending reduce_scatter_v(const Tensor& in, const Tensor& out,
                                         std::span<const int64_t> rows);
  /// out may be in.
  [[nodiscard]] Pending all_reduce(const Tensor& in, const Tensor& out,
                                   ReduceOp op = ReduceOp::kSum);
  /// in [size·n, ...]: part i goes to rank i, where it becomes part rank() of out.
  [[nodiscard]] Pending all_to_all(const Tensor& in, const Tensor& out);
  [[nodiscard]] Pending all_to_all(RowMoves moves);
  /// The same with send_rows[i] rows to rank i and receive_rows[i] from it, each in order without
  /// gaps.
  [[nodiscard]] Pending all_to_all_v(const Tensor& in, const Tensor& out,
                                     std::span<const int64_t> send_rows,
                                     std::span<const int64_t> receive_rows);
  [[nodiscard]] Pending all_to_all_v(RowMoves moves, std::span<const int64_t> send_rows,
                                     std::span<const int64_t> receive_rows);
  /// Whether the same takes counts that only a device knows.
  virtual bool takes_device_counts() const { return false; }
  /// The same with I64 [size] counts in the memory of the tensors' device, which the host does not
  /// wait for. CommStatistics counts the call and no bytes. REQUIRES takes_device_counts().
  [[nodiscard]] Pending all_to_all_v(RowMoves moves, const Tensor& send_rows,
                                     const Tensor& receive_rows);
  /// Called by all members before messages between neighbours of the group, of which its first and
  /// last are two: back ends may need it to connect them.
  virtual void connect_neighbours() {}
  /// Messages between two ranks arrive in the order in which they were sent.
  [[nodiscard]] Pending send(const Tensor& tensor, int64_t to);
  [[nodiscard]] Pending receive(const Tensor& tensor, int64_t from);
  /// From rank `root` to all; in place.
  [[nodiscard]] Pending broadcast(const Tensor& tensor, int64_t root);
  void barrier();

 protected:
  Communicator(std::string name, std::vector<int64_t> ranks, int64_t rank,
               std::shared_ptr<CommStatistics> statistics);

  virtual Pending do_all_gather_v(const Tensor& in, const Tensor& out,
                                  std::span<const int64_t> rows) = 0;
  virtual Pending do_reduce_scatter_v(const Tensor& in, const Tensor& out,
                                      std::span<const int64_t> rows) = 0;
  virtual Pending do_all_reduce(const Tensor& in, const Tensor& out, ReduceOp op) = 0;
  virtual Pending do_all_to_all_v(const Tensor& in, const Tensor& out,
                                  std::span<const int64_t> send_rows,
                                  std::span<const int64_t> receive_rows) = 0;
  /// Of several tensors: one after the other, where a back end has nothing better.
  virtual Pending do_all_gather_moves(RowMoves moves, std::span<const int64_t> rows);
  virtual Pending do_all_to_all_moves(RowMoves moves, std::span<const int64_t> send_rows,
                                      std::span<const int64_t> receive_rows);
  virtual Pending do_all_to_all_moves(RowMoves moves, const Tensor& send_rows,
                                      const Tensor& receive_rows);
  virtual Pending do_send(const Tensor& tensor, int64_t to) = 0;
  virtual Pending do_receive(const Tensor& tensor, int64_t from) = 0;
  virtual Pending do_broadcast(const Tensor& tensor, int64_t root) = 0;
  virtual void do_barrier() = 0;

 private:
  void count(CommKind kind, int64_t bytes);
  /// Calls start(), which begins an operation in the back end; who observes is told of its end.
  template <typename Start>
  Pending start(CommKind kind, int64_t bytes, const Start& start);

  std::string name_;
  std::vector<int64_t> ranks_;
  int64_t rank_;
  std::shared_ptr<CommStatistics> statistics_;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

/// This process's (or thread's) place among all ranks. There is no global one: whoever
/// communicates is given a World or a Communicator.
class World {
 public:
  virtual ~World() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  /// Joins the ranks into a group; `ranks` holds this rank. All members must call, with the same
  /// arguments and in the same order of groups. A group of one rank needs no back end.
  virtual CommunicatorPtr make_group(const std::string& name,
                                     const std::vector<int64_t>& ranks) = 0;
  virtual const CommStatistics& statistics() const = 0;
  virtual CommStatistics& statistics() = 0;
  /// Another rank's process has ended, or the launcher is ending all, as far as this rank can see.
  virtual bool ending() { return false; }
  /// Ends all ranks' processes, this one included, with this exit code: for a rank that cannot go
  /// on, after it said why.
  [[noreturn]] void abort(int exit_code);

  /// The group of all ranks, "world".
  CommunicatorPtr make_world_group();

 protected:
  /// Ends the other ranks' processes, where they are processes.
  virtual void end_others(int /*exit_code*/) {}
  /// This rank's index in `ranks`. Throws InternalError unless they are distinct ranks of the world
  /// and hold this one.
  int64_t place_in_group(const std::string& name, const std::vector<int64_t>& ranks) const;
};

/// A communicator of one rank, as single-process runs use.
CommunicatorPtr make_single_communicator(const std::string& name);
/// The same for a rank of a larger world, with the statistics of that.
CommunicatorPtr make_single_communicator(const std::string& name, int64_t rank,
                                         std::shared_ptr<CommStatistics> statistics);
/// A world of one rank.
std::unique_ptr<World> make_single_world();

}  // namespace tessera
