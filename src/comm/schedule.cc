#include "comm/schedule.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/reduce.h"
#include "comm/rows.h"

namespace tessera {
namespace {

using RowCounts = std::vector<int64_t>;

// A sum of all inputs' bytes up to which one round of small messages beats two.
constexpr int64_t kSmallReduction = 64 << 10;
static_assert(kSmallReduction <= ScratchPool::kSmallBytes);

void add_message(Round& round, bool is_send, int64_t peer, void* data, int64_t bytes) {
  if (bytes > 0) round.messages.push_back({is_send, peer, data, bytes});
}

// All others, each rank beginning with another, so that no rank is everyone's first.
int64_t peer_at(const Place& place, int64_t distance) {
  return (place.rank + distance) % place.size;
}

/// A contiguous range of elements.
struct Range {
  int64_t begin = 0;
  int64_t count = 0;
};

/// What reductions by pieces share: all ranks send their piece `step` of part i to rank i.
class PartReduction {
 public:
  PartReduction(const Place& place, const Tensor& in, const RowCounts& parts, ScratchPool& scratch)
      : place_(place), in_(in) {
    int64_t begin = 0;
    for (const int64_t count : parts) {
      parts_.push_back({begin, count});
      begin += count;
    }
    ensure(place.size > 1, "a reduction over one rank needs no messages");
    const int64_t room = ScratchPool::kBytes / (place.size - 1) / dtype_size(in.dtype);
    const int64_t most = std::ranges::max(parts);
    piece_ = std::max<int64_t>(std::min(room / 16 * 16, most), 1);
    ensure(piece_ * dtype_size(in.dtype) * (place.size - 1) <= ScratchPool::kBytes,
           "reduction over {} ranks: the scratch memory has no element for each", place.size);
    num_pieces_ = (most + piece_ - 1) / piece_;
    scratch_ = scratch.take(bytes(piece_ * (place.size - 1)));
  }

  int64_t num_pieces() const { return num_pieces_; }
  /// Piece `step` of rank `owner`'s part, in elements of the whole.
  Range piece(int64_t owner, int64_t step) const {
    const Range part = parts_[owner];
    const int64_t skip = std::min(part.count, step * piece_);
    return {part.begin + skip, std::min(piece_, part.count - skip)};
  }

  void add_messages(int64_t step, Round& round) const {
    const int64_t own = piece(place_.rank, step).count;
    for (int64_t distance = 1; distance < place_.size; ++distance) {
      const int64_t from = peer_at(place_, place_.size - distance);
      const int64_t to = peer_at(place_, distance);
      add_message(round, false, from, received_from(from), bytes(own));
      const Range theirs = piece(to, step);
      add_message(round, true, to, at(in_, theirs.begin), bytes(theirs.count));
    }
  }

  /// Reduces this rank's piece into `out`.
  void reduce(int64_t step, ReduceOp op, void* out) const {
    const Range own = piece(place_.rank, step);
    std::vector<const void*> inputs;
    for (int64_t from = 0; from < place_.size; ++from)
      inputs.push_back(from == place_.rank ? at(in_, own.begin) : received_from(from));
    reduce_elements(in_.dtype, op, inputs, out, own.count);
  }

  std::byte* at(const Tensor& tensor, int64_t element) const {
    return static_cast<std::byte*>(tensor.data) + bytes(element);
  }
  int64_t bytes(int64_t count) const { return count * dtype_size(in_.dtype); }

 private:
  std::byte* received_from(int64_t from) const {
    return scratch_->data() + bytes((from < place_.rank ? from : from - 1) * piece_);
  }

  Place place_;
  Tensor in_;
  std::vector<Range> parts_;
  int64_t piece_ = 1;
  int64_t num_pieces_ = 0;
  std::shared_ptr<Buffer> scratch_;
};

// Every rank gets all inputs and reduces them by itself: one round instead of two.
Schedule small_all_reduce_schedule(const Place& place, const Tensor& in, const Tensor& out,
                                   ReduceOp op, ScratchPool& scratch) {
  const std::shared_ptr<Buffer> buffer = scratch.take(in.num_bytes() * place.size);
  const auto input_of = [=](int64_t from) {
    return from == place.rank ? static_cast<std::byte*>(in.data)
                              : buffer->data() + from * in.num_bytes();
  };
  return [=](int64_t step, Round& round) {
    if (step > 0) return false;
    for (int64_t distance = 1; distance < place.size; ++distance) {
      const int64_t from = peer_at(place, place.size - distance);
      add_message(round, false, from, input_of(from), in.num_bytes());
      add_message(round, true, peer_at(place, distance), in.data, in.num_bytes());
    }
    round.then = [=] {
      std::vector<const void*> inputs;
      for (int64_t from = 0; from < place.size; ++from) inputs.push_back(input_of(from));
      reduce_elements(in.dtype, op, inputs, out.data, in.num_elements());
    };
    return true;
  };
}

}  // namespace

Schedule all_gather_schedule(const Place& place, const Tensor& in, const Tensor& out,
                             std::span<const int64_t> rows) {
  return [=, rows = RowCounts(rows.begin(), rows.end())](int64_t step, Round& round) {
    if (step > 0) return false;
    const int64_t own = rows[place.rank] * row_bytes(in);
    for (int64_t distance = 1; distance < place.size; ++distance) {
      const int64_t from = peer_at(place, place.size - distance);
      add_message(round, false, from, row_data(out, rows_before(rows, from)),
                  rows[from] * row_bytes(out));
      add_message(round, true, peer_at(place, distance), in.data, own);
    }
    copy_bytes(in.data, row_data(out, rows_before(rows, place.rank)), own);
    return true;
  };
}

Schedule all_to_all_schedule(const Place& place, const Tensor& in, const Tensor& out,
                             std::span<const int64_t> send_rows,
                             std::span<const int64_t> receive_rows) {
  return [=, send_rows = RowCounts(send_rows.begin(), send_rows.end()),
          receive_rows = RowCounts(receive_rows.begin(), receive_rows.end())](int64_t step,
                                                                              Round& round) {
    if (step > 0) return false;
    for (int64_t distance = 1; distance < place.size; ++distance) {
      const int64_t from = peer_at(place, place.size - distance);
      const int64_t to = peer_at(place, distance);
      add_message(round, false, from, row_data(out, rows_before(receive_rows, from)),
                  receive_rows[from] * row_bytes(out));
      add_message(round, true, to, row_data(in, rows_before(send_rows, to)),
                  send_rows[to] * row_bytes(in));
    }
    copy_bytes(row_data(in, rows_before(send_rows, place.rank)),
               row_data(out, rows_before(receive_rows, place.rank)),
               send_rows[place.rank] * row_bytes(in));
    return true;
  };
}

Schedule joint_schedule(std::vector<Schedule> schedules) {
  return [schedules = std::move(schedules)](int64_t step, Round& round) {
    bool goes_on = false;
    std::vector<std::function<void()>> behind;
    for (const Schedule& schedule : schedules) {
      Round part;
      if (!schedule(step, part)) continue;
      goes_on = true;
      round.messages.insert(round.messages.end(), part.messages.begin(), part.messages.end());
      if (part.then) behind.push_back(std::move(part.then));
    }
    if (!behind.empty()) {
      round.then = [behind = std::move(behind)] {
        for (const auto& then : behind) then();
      };
    }
    return goes_on;
  };
}

Schedule reduce_scatter_schedule(const Place& place, const Tensor& in, const Tensor& out,
                                 std::span<const int64_t> rows, ScratchPool& scratch) {
  RowCounts parts(rows.begin(), rows.end());
  for (int64_t& part : parts) part *= row_elements(in);
  const auto reduction = std::make_shared<PartReduction>(place, in, parts, scratch);
  return [=](int64_t step, Round& round) {
    if (step >= reduction->num_pieces()) return false;
    reduction->add_messages(step, round);
    round.then = [=] {
      const Range own = reduction->piece(place.rank, step);
      const int64_t skip = own.begin - reduction->piece(place.rank, 0).begin;
      reduction->reduce(step, ReduceOp::kSum, reduction->at(out, skip));
    };
    return true;
  };
}

Schedule all_reduce_schedule(const Place& place, const Tensor& in, const Tensor& out, ReduceOp op,
                             ScratchPool& scratch) {
  if (in.num_bytes() * place.size <= kSmallReduction)
    return small_all_reduce_schedule(place, in, out, op, scratch);
  RowCounts parts;
  for (int64_t i = 0; i < place.size; ++i) {
    parts.push_back(in.num_elements() * (i + 1) / place.size - in.num_elements() * i / place.size);
  }
  const auto reduction = std::make_shared<PartReduction>(place, in, parts, scratch);
  // Even steps reduce a piece of each part, odd ones gather the results. A piece was sent before it
  // is overwritten, so out may be in.
  return [=](int64_t step, Round& round) {
    const int64_t piece = step / 2;
    if (piece >= reduction->num_pieces()) return false;
    const Range own = reduction->piece(place.rank, piece);
    if (step % 2 == 0) {
      reduction->add_messages(piece, round);
      round.then = [=] { reduction->reduce(piece, op, reduction->at(out, own.begin)); };
      return true;
    }
    for (int64_t distance = 1; distance < place.size; ++distance) {
      const int64_t from = peer_at(place, place.size - distance);
      const Range theirs = reduction->piece(from, piece);
      add_message(round, false, from, reduction->at(out, theirs.begin),
                  reduction->bytes(theirs.count));
      add_message(round, true, peer_at(place, distance), reduction->at(out, own.begin),
                  reduction->bytes(own.count));
    }
    return true;
  };
}

Schedule broadcast_schedule(const Place& place, const Tensor& tensor, int64_t root) {
  // Places counted from the root: the parent of place p is p without its lowest set bit.
  return [=](int64_t step, Round& round) {
    if (step > 1) return false;
    const int64_t at = (place.rank - root + place.size) % place.size;
    const int64_t lowest = at == 0 ? place.size : at & -at;
    const auto rank_of = [&](int64_t index) { return (index + root) % place.size; };
    if (step == 0) {
      if (at > 0) add_message(round, false, rank_of(at - lowest), tensor.data, tensor.num_bytes());
      return true;
    }
    for (int64_t bit = 1; bit < lowest && at + bit < place.size; bit *= 2)
      add_message(round, true, rank_of(at + bit), tensor.data, tensor.num_bytes());
    return true;
  };
}

Schedule barrier_schedule(const Place& place) {
  const auto token = std::make_shared<std::array<std::byte, 2>>();
  return [=](int64_t step, Round& round) {
    const int64_t distance = int64_t{1} << step;
    if (distance >= place.size) return false;
    const int64_t from = peer_at(place, place.size - distance);
    add_message(round, false, from, &(*token)[0], 1);
    add_message(round, true, peer_at(place, distance), &(*token)[1], 1);
    return true;
  };
}

Schedule message_schedule(bool is_send, int64_t peer, const Tensor& tensor) {
  return [=](int64_t step, Round& round) {
    if (step > 0) return false;
    add_message(round, is_send, peer, tensor.data, tensor.num_bytes());
    return true;
  };
}

}  // namespace tessera
