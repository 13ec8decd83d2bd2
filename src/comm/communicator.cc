#include "comm/communicator.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>

#include "comm/joint_work.h"
#include "comm/rows.h"
#include "comm/timed_work.h"
#include "core/device.h"

namespace tessera {
namespace {

bool can_reduce(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF64 ||
         dtype == DType::kI32 || dtype == DType::kI64;
}

// Both have rows of the same size.
void check_rows(const Tensor& in, const Tensor& out, const char* what) {
  ensure(in.dtype == out.dtype && in.shape.rank() > 0 && out.shape.rank() > 0 &&
             row_bytes(in) == row_bytes(out),
         "{}: rows of in {} {} differ from rows of out {} {}", what, dtype_name(in.dtype),
         in.shape.to_string(), dtype_name(out.dtype), out.shape.to_string());
}

void check_counts(std::span<const int64_t> rows, int64_t size, const char* what) {
  ensure(std::ssize(rows) == size && std::ranges::all_of(rows, [](int64_t n) { return n >= 0; }),
         "{}: {} numbers of rows for a group of {}, or a negative one", what, rows.size(), size);
}

void check_room(const Tensor& tensor, int64_t rows, const char* what) {
  ensure(tensor.shape[0] >= rows, "{}: {} rows in a buffer of shape {}", what, rows,
         tensor.shape.to_string());
}

Pending copy_bytes(const Tensor& in, const Tensor& out, int64_t num_bytes) {
  if (num_bytes == 0 || in.data == out.data) return {};
  Device* const device = in.device != nullptr ? in.device : out.device;
  if (device != nullptr) {
    device->copy(out.data, in.data, num_bytes);
  } else {
    std::memmove(out.data, in.data, num_bytes);
  }
  return {};
}

Pending copy_rows(const Tensor& in, const Tensor& out, int64_t rows) {
  return copy_bytes(in, out, rows * row_bytes(in));
}

Pending copy_rows(RowMoves moves, int64_t rows) {
  for (const RowMove& move : moves) copy_rows(move.in, move.out, rows).wait();
  return {};
}

int64_t bytes_of_row(RowMoves moves) {
  int64_t bytes = 0;
  for (const RowMove& move : moves) bytes += row_bytes(move.in);
  return bytes;
}

/// Tells who observes when an operation was complete: on a device as measured there, else when this
/// rank saw it.
class ObservedWork : public Work {
 public:
  ObservedWork(std::unique_ptr<Work> work, CommEvent event,
               std::shared_ptr<CommStatistics> statistics)
      : work_(std::move(work)), event_(std::move(event)), statistics_(std::move(statistics)) {}

  void wait() override {
    const CommEvent::Clock::time_point begin = CommEvent::Clock::now();
    work_->wait();
    event_.waited = CommEvent::Clock::now() - begin;
    tell();
  }
  bool done() override {
    if (!work_->done()) return false;
    tell();
    return true;
  }
  void abandon() noexcept override { work_->abandon(); }

 private:
  void tell() {
    if (told_) return;
    told_ = true;
    event_.end = CommEvent::Clock::now();
    if (tell_when_known()) return;
    statistics_->tell(event_);
  }
  bool tell_when_known() {
    auto* const timed = dynamic_cast<TimedWork*>(work_.get());
    if (timed == nullptr) return false;
    return timed->when_known(
        [event = event_, statistics = statistics_](TimedWork::Time begin, TimedWork::Time end) {
          CommEvent measured = event;
          measured.begin = begin;
          measured.end = end;
          statistics->tell(measured);
        });
  }

  std::unique_ptr<Work> work_;
  CommEvent event_;
  std::shared_ptr<CommStatistics> statistics_;
  bool told_ = false;
};

}  // namespace

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this != &other) {
    Pending old(std::move(work_));
    work_ = std::move(other.work_);
  }
  return *this;
}

Pending::~Pending() {
  if (!work_) return;
  if (std::uncaught_exceptions() > 0) {
    work_->abandon();
    return;
  }
  try {
    work_->wait();
  } catch (const std::exception&) {
    // The failure stays with the back end: the next operation or wait reports it.
    work_->abandon();
  }
}

void Pending::wait() {
  if (!work_) return;
  work_->wait();
  work_.reset();
}

bool Pending::done() {
  return !work_ || work_->done();
}

Communicator::Communicator(std::string name, std::vector<int64_t> ranks, int64_t rank,
                           std::shared_ptr<CommStatistics> statistics)
    : name_(std::move(name)),
      ranks_(std::move(ranks)),
      rank_(rank),
      statistics_(std::move(statistics)) {
  ensure(rank_ >= 0 && rank_ < size(), "group {}: rank {} of {}", name_, rank_, size());
}

void Communicator::count(CommKind kind, int64_t bytes) {
  statistics_->add(name_, kind, bytes);
}

template <typename Start>
Pending Communicator::start(CommKind kind, int64_t bytes, const Start& start) {
  if (!statistics_->observed()) return start();
  CommEvent event{.group = name_, .kind = kind, .bytes = bytes, .begin = CommEvent::Clock::now()};
  Pending pending = start();
  if (pending.work_ == nullptr) {
    event.end = CommEvent::Clock::now();
    statistics_->tell(event);
    return pending;
  }
  return Pending(
      std::make_unique<ObservedWork>(std::move(pending.work_), std::move(event), statistics_));
}

Pending Communicator::all_gather(const Tensor& in, const Tensor& out) {
  return all_gather(std::array{RowMove{in, out}});
}

Pending Communicator::all_gather(RowMoves moves) {
  ensure(!moves.empty(), "all_gather of nothing");
  for (const auto& [in, out] : moves) {
    ensure(in.shape.rank() > 0 && out.shape.rank() > 0 && out.shape[0] == size() * in.shape[0],
           "all_gather over {} ranks: in {}, out {}", size(), in.shape.to_string(),
           out.shape.to_string());
  }
  const std::vector<int64_t> rows(ranks_.size(), moves[0].in.shape[0]);
  return all_gather_v(moves, rows);
}

Pending Communicator::all_gather_v(const Tensor& in, const Tensor& out,
                                   std::span<const int64_t> rows) {
  return all_gather_v(std::array{RowMove{in, out}}, rows);
}

Pending Communicator::all_gather_v(RowMoves moves, std::span<const int64_t> rows) {
  ensure(!moves.empty(), "all_gather of nothing");
  check_counts(rows, size(), "all_gather");
  const int64_t own = rows[rank_];
  for (const auto& [in, out] : moves) {
    check_rows(in, out, "all_gather");
    check_room(in, own, "all_gather");
    check_room(out, sum_rows(rows), "all_gather");
  }
  const int64_t bytes = (size() - 1) * own * bytes_of_row(moves);
  count(CommKind::kAllGather, bytes);
  if (size() == 1) return copy_rows(moves, own);
  return start(CommKind::kAllGather, bytes, [&] {
    return moves.size() == 1 ? do_all_gather_v(moves[0].in, moves[0].out, rows)
                             : do_all_gather_moves(moves, rows);
  });
}

Pending Communicator::do_all_gather_moves(RowMoves moves, std::span<const int64_t> rows) {
  std::vector<Pending> all;
  for (const auto& [in, out] : moves) all.push_back(do_all_gather_v(in, out, rows));
  return join_pending(std::move(all));
}

Pending Communicator::reduce_scatter(const Tensor& in, const Tensor& out) {
  ensure(in.shape.rank() > 0 && out.shape.rank() > 0 && in.shape[0] == size() * out.shape[0],
         "reduce_scatter over {} ranks: in {}, out {}", size(), in.shape.to_string(),
         out.shape.to_string());
  const std::vector<int64_t> rows(ranks_.size(), out.shape[0]);
  return reduce_scatter_v(in, out, rows);
}

Pending Communicator::reduce_scatter_v(const Tensor& in, const Tensor& out,
                                       std::span<const int64_t> rows) {
  check_rows(in, out, "reduce_scatter");
  check_counts(rows, size(), "reduce_scatter");
  ensure(can_reduce(in.dtype), "reduce_scatter of {}", dtype_name(in.dtype));
  const int64_t own = rows[rank_];
  check_room(in, sum_rows(rows), "reduce_scatter");
  check_room(out, own, "reduce_scatter");
  const int64_t bytes = (sum_rows(rows) - own) * row_bytes(in);
  count(CommKind::kReduceScatter, bytes);
  if (size() == 1) return copy_rows(in, out, own);
  return start(CommKind::kReduceScatter, bytes, [&] { return do_reduce_scatter_v(in, out, rows); });
}

Pending Communicator::all_reduce(const Tensor& in, const Tensor& out, ReduceOp op) {
  ensure(in.dtype == out.dtype && in.shape == out.shape && can_reduce(in.dtype),
         "all_reduce: in {} {}, out {} {}", dtype_name(in.dtype), in.shape.to_string(),
         dtype_name(out.dtype), out.shape.to_string());
  const int64_t bytes = 2 * (size() - 1) * in.num_bytes() / size();
  count(CommKind::kAllReduce, bytes);
  if (size() == 1) return copy_bytes(in, out, in.num_bytes());
  return start(CommKind::kAllReduce, bytes, [&] { return do_all_reduce(in, out, op); });
}

Pending Communicator::all_to_all(const Tensor& in, const Tensor& out) {
  return all_to_all(std::array{RowMove{in, out}});
}

Pending Communicator::all_to_all(RowMoves moves) {
  ensure(!moves.empty(), "all_to_all of nothing");
  for (const auto& [in, out] : moves) {
    ensure(in.shape.rank() > 0 && in.shape == out.shape && in.shape[0] % size() == 0,
           "all_to_all over {} ranks: in {}, out {}", size(), in.shape.to_string(),
           out.shape.to_string());
  }
  const std::vector<int64_t> rows(ranks_.size(), moves[0].in.shape[0] / size());
  return all_to_all_v(moves, rows, rows);
}

Pending Communicator::all_to_all_v(const Tensor& in, const Tensor& out,
                                   std::span<const int64_t> send_rows,
                                   std::span<const int64_t> receive_rows) {
  return all_to_all_v(std::array{RowMove{in, out}}, send_rows, receive_rows);
}

Pending Communicator::all_to_all_v(RowMoves moves, std::span<const int64_t> send_rows,
                                   std::span<const int64_t> receive_rows) {
  ensure(!moves.empty(), "all_to_all of nothing");
  check_counts(send_rows, size(), "all_to_all");
  check_counts(receive_rows, size(), "all_to_all");
  for (const auto& [in, out] : moves) {
    check_rows(in, out, "all_to_all");
    check_room(in, sum_rows(send_rows), "all_to_all");
    check_room(out, sum_rows(receive_rows), "all_to_all");
  }
  const int64_t own = send_rows[rank_];
  ensure(own == receive_rows[rank_], "all_to_all: {} rows to itself, {} from itself", own,
         receive_rows[rank_]);
  const int64_t bytes = (sum_rows(send_rows) - own) * bytes_of_row(moves);
  count(CommKind::kAllToAll, bytes);
  if (size() == 1) return copy_rows(moves, own);
  return start(CommKind::kAllToAll, bytes, [&] {
    return moves.size() == 1 ? do_all_to_all_v(moves[0].in, moves[0].out, send_rows, receive_rows)
                             : do_all_to_all_moves(moves, send_rows, receive_rows);
  });
}

Pending Communicator::do_all_to_all_moves(RowMoves moves, std::span<const int64_t> send_rows,
                                          std::span<const int64_t> receive_rows) {
  std::vector<Pending> all;
  for (const auto& [in, out] : moves)
    all.push_back(do_all_to_all_v(in, out, send_rows, receive_rows));
  return join_pending(std::move(all));
}

Pending Communicator::all_to_all_v(RowMoves moves, const Tensor& send_rows,
                                   const Tensor& receive_rows) {
  ensure(!moves.empty(), "all_to_all of nothing");
  for (const RowMove& move : moves) check_rows(move.in, move.out, "all_to_all");
  for (const Tensor& counts : {send_rows, receive_rows}) {
    ensure(counts.dtype == DType::kI64 && counts.shape == Shape{size()} &&
               counts.device == moves[0].in.device,
           "all_to_all over {} ranks: counts {} {}", size(), dtype_name(counts.dtype),
           counts.shape.to_string());
  }
  count(CommKind::kAllToAll, 0);
  return start(CommKind::kAllToAll, 0,
               [&] { return do_all_to_all_moves(moves, send_rows, receive_rows); });
}

Pending Communicator::do_all_to_all_moves(RowMoves /*moves*/, const Tensor& /*send_rows*/,
                                          const Tensor& /*receive_rows*/) {
  throw InternalError(fmt::format("group {}: counts that only a device knows", name_));
}

Pending Communicator::send(const Tensor& tensor, int64_t to) {
  ensure(to >= 0 && to < size() && to != rank_, "send from {} to {} in a group of {}", rank_, to,
         size());
  count(CommKind::kSend, tensor.num_bytes());
  return start(CommKind::kSend, tensor.num_bytes(), [&] { return do_send(tensor, to); });
}

Pending Communicator::receive(const Tensor& tensor, int64_t from) {
  ensure(from >= 0 && from < size() && from != rank_, "receive by {} from {} in a group of {}",
         rank_, from, size());
  count(CommKind::kReceive, 0);
  return start(CommKind::kReceive, tensor.num_bytes(), [&] { return do_receive(tensor, from); });
}

Pending Communicator::broadcast(const Tensor& tensor, int64_t root) {
  ensure(root >= 0 && root < size(), "broadcast from {} in a group of {}", root, size());
  const int64_t bytes = rank_ == root && size() > 1 ? tensor.num_bytes() : 0;
  count(CommKind::kBroadcast, bytes);
  if (size() == 1) return {};
  return start(CommKind::kBroadcast, bytes, [&] { return do_broadcast(tensor, root); });
}

void Communicator::barrier() {
  count(CommKind::kBarrier, 0);
  if (size() == 1) return;
  const CommEvent::Clock::time_point begin = CommEvent::Clock::now();
  do_barrier();
  const CommEvent::Clock::time_point end = CommEvent::Clock::now();
  statistics_->tell({.group = name_,
                     .kind = CommKind::kBarrier,
                     .begin = begin,
                     .end = end,
                     .waited = end - begin});
}

int64_t World::place_in_group(const std::string& name, const std::vector<int64_t>& ranks) const {
  for (size_t i = 0; i < ranks.size(); ++i) {
    ensure(ranks[i] >= 0 && ranks[i] < size() &&
               std::find(ranks.begin(), ranks.begin() + static_cast<int64_t>(i), ranks[i]) ==
                   ranks.begin() + static_cast<int64_t>(i),
           "group {}: rank {} twice, or not among {} ranks", name, ranks[i], size());
  }
  const auto found = std::ranges::find(ranks, rank());
  ensure(found != ranks.end(), "group {} does not hold the rank {} that makes it", name, rank());
  return found - ranks.begin();
}

void World::abort(int exit_code) {
  end_others(exit_code);
  std::_Exit(exit_code);
}

CommunicatorPtr World::make_world_group() {
  std::vector<int64_t> ranks(size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return make_group("world", ranks);
}

}  // namespace tessera
