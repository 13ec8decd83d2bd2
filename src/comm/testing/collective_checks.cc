#include "comm/testing/collective_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "comm/rows.h"
#include "core/memory.h"
#include "core/random.h"

namespace tessera {
namespace {

using RowCounts = std::vector<int64_t>;

/// A group whose members know what all members' buffers hold.
struct Fixture {
  CommunicatorPtr group;
  CommStatistics* statistics;
  DType dtype;
  int64_t columns;
  uint64_t seed;
  Random random;  ///< the same numbers on all members
  SumOrder order = SumOrder::kRanks;

  int64_t size() const { return group->size(); }
  int64_t rank() const { return group->rank(); }
};

void set_element(const Tensor& tensor, int64_t i, double value) {
  switch (tensor.dtype) {
    case DType::kF32:
      tensor.as<float>()[i] = static_cast<float>(value);
      break;
    case DType::kBF16:
      tensor.as<Bf16>()[i] = Bf16(static_cast<float>(value));
      break;
    case DType::kF64:
      tensor.as<double>()[i] = value;
      break;
    case DType::kI32:
      tensor.as<int32_t>()[i] = static_cast<int32_t>(value * 1000);
      break;
    case DType::kI64:
      tensor.as<int64_t>()[i] = static_cast<int64_t>(value * 1e12);
      break;
    default:
      tensor.as<uint8_t>()[i] = static_cast<uint8_t>(static_cast<int64_t>(value * 1000));
  }
}

/// What member `member` brings as its buffer `which`.
OwnedTensor input(const Fixture& f, int64_t member, uint64_t which, int64_t rows) {
  OwnedTensor owned(f.dtype, {rows, f.columns});
  Random random(mix(f.seed, which), static_cast<uint64_t>(member));
  const bool whole =
      f.order == SumOrder::kAny && (f.dtype == DType::kF32 || f.dtype == DType::kF64);
  for (int64_t i = 0; i < owned.get().num_elements(); ++i) {
    const double value = random.next_normal();
    set_element(owned, i, whole ? std::round(100 * value) : value);
  }
  return owned;
}

template <typename T, typename Sum>
void reduce_as(const std::vector<OwnedTensor>& inputs, ReduceOp op, const Tensor& out) {
  for (int64_t i = 0; i < out.num_elements(); ++i) {
    auto sum = static_cast<Sum>(inputs[0].get().as<T>()[i]);
    for (size_t k = 1; k < inputs.size(); ++k) {
      const auto next = static_cast<Sum>(inputs[k].get().as<T>()[i]);
      sum = op == ReduceOp::kSum ? sum + next : std::max(sum, next);
    }
    out.as<T>()[i] = T(sum);
  }
}

OwnedTensor reduced(const std::vector<OwnedTensor>& inputs, ReduceOp op) {
  OwnedTensor out(inputs[0].get().dtype, inputs[0].get().shape);
  switch (out.get().dtype) {
    case DType::kF32:
      reduce_as<float, float>(inputs, op, out);
      break;
    case DType::kBF16:
      reduce_as<Bf16, float>(inputs, op, out);
      break;
    case DType::kF64:
      reduce_as<double, double>(inputs, op, out);
      break;
    case DType::kI32:
      reduce_as<int32_t, int32_t>(inputs, op, out);
      break;
    default:
      reduce_as<int64_t, int64_t>(inputs, op, out);
  }
  return out;
}

// `rows` rows of both are the same bytes.
void expect_rows(const Tensor& found, int64_t at, const Tensor& expected, int64_t from,
                 int64_t rows, const char* what) {
  if (rows == 0 || row_bytes(found) == 0) return;
  EXPECT_EQ(std::memcmp(row_data(found, at), row_data(expected, from),
                        static_cast<size_t>(rows * row_bytes(found))),
            0)
      << what << " of " << rows << " rows of " << row_bytes(found) << " bytes of "
      << dtype_name(found.dtype);
}

RowCounts random_rows(Random& random, int64_t count, bool equal) {
  RowCounts rows(static_cast<size_t>(count));
  for (int64_t& n : rows) n = static_cast<int64_t>(random.next_below(6));
  if (equal) std::ranges::fill(rows, rows[0]);
  return rows;
}

// Room that an operation leaves alone.
constexpr int64_t kSlack = 2;

class Counted {
 public:
  Counted(const Fixture& f, CommKind kind, int64_t bytes)
      : f_(f), kind_(kind), bytes_(bytes), before_(f.statistics->count(f.group->name(), kind)) {}
  ~Counted() {
    const CommCount after = f_.statistics->count(f_.group->name(), kind_);
    EXPECT_EQ(after.calls - before_.calls, 1);
    EXPECT_EQ(after.bytes - before_.bytes, bytes_) << comm_kind_name(kind_);
  }

 private:
  const Fixture& f_;
  CommKind kind_;
  int64_t bytes_;
  CommCount before_;
};

/// At times: rows of other numbers that go along in one operation.
class Companion {
 public:
  Companion(Fixture& f, uint64_t which)
      : f_(f), which_(mix(which, 1)), goes_along_(f.random.next_below(2) == 0) {}

  void make(int64_t rows, int64_t rows_out) {
    if (!goes_along_) return;
    in_.emplace(input(f_, f_.rank(), which_, rows));
    out_.emplace(f_.dtype, Shape{rows_out, f_.columns});
  }
  void add_to(std::vector<RowMove>& moves) const {
    if (goes_along_) moves.push_back({*in_, *out_});
  }
  /// `count` rows of what arrived are rows `from` and on of the `rows` that a member had.
  void expect(int64_t at, int64_t member, int64_t rows, int64_t from, int64_t count) const {
    if (goes_along_)
      expect_rows(*out_, at, input(f_, member, which_, rows), from, count, "what goes along");
  }

 private:
  Fixture& f_;
  uint64_t which_;
  bool goes_along_;
  std::optional<OwnedTensor> in_;
  std::optional<OwnedTensor> out_;
};

void check_all_gather(Fixture& f, uint64_t which) {
  const bool equal = f.random.next_below(2) == 0;
  const bool in_place = f.random.next_below(3) == 0;
  const RowCounts rows = random_rows(f.random, f.size(), equal);
  const int64_t own = rows[f.rank()];
  const OwnedTensor in = input(f, f.rank(), which, own);
  const OwnedTensor out(f.dtype, {sum_rows(rows) + (equal ? 0 : kSlack), f.columns});
  Tensor from = in;
  if (in_place && own > 0) {
    from.data = row_data(out, rows_before(rows, f.rank()));
    std::memcpy(from.data, in.get().data, from.num_bytes());
  }
  Companion more(f, which);
  more.make(own, out.get().shape[0]);
  std::vector<RowMove> moves{{from, out}};
  more.add_to(moves);
  {
    const int64_t width = row_bytes(in) * std::ssize(moves);
    const Counted counted(f, CommKind::kAllGather, (f.size() - 1) * own * width);
    (equal ? f.group->all_gather(moves) : f.group->all_gather_v(moves, rows)).wait();
  }
  for (int64_t member = 0; member < f.size(); ++member) {
    const int64_t n = rows[member];
    expect_rows(out, rows_before(rows, member), input(f, member, which, n), 0, n, "all_gather");
    more.expect(rows_before(rows, member), member, n, 0, n);
  }
}

void check_reduce_scatter(Fixture& f, uint64_t which) {
  const bool equal = f.random.next_below(2) == 0;
  const RowCounts rows = random_rows(f.random, f.size(), equal);
  const int64_t total = sum_rows(rows);
  const int64_t own = rows[f.rank()];
  const OwnedTensor in = input(f, f.rank(), which, total);
  const OwnedTensor out(f.dtype, {own + (equal ? 0 : kSlack), f.columns});
  {
    const Counted counted(f, CommKind::kReduceScatter, (total - own) * row_bytes(in));
    (equal ? f.group->reduce_scatter(in, out) : f.group->reduce_scatter_v(in, out, rows)).wait();
  }
  std::vector<OwnedTensor> inputs;
  for (int64_t member = 0; member < f.size(); ++member)
    inputs.push_back(input(f, member, which, total));
  expect_rows(out, 0, reduced(inputs, ReduceOp::kSum), rows_before(rows, f.rank()), own,
              "reduce_scatter");
}

void check_all_reduce(Fixture& f, uint64_t which) {
  const ReduceOp op = f.random.next_below(3) == 0 ? ReduceOp::kMax : ReduceOp::kSum;
  const bool in_place = f.random.next_below(2) == 0;
  const auto rows = static_cast<int64_t>(f.random.next_below(9));
  const OwnedTensor in = input(f, f.rank(), which, rows);
  const OwnedTensor out(f.dtype, {rows, f.columns});
  {
    const Counted counted(f, CommKind::kAllReduce,
                          2 * (f.size() - 1) * in.get().num_bytes() / f.size());
    f.group->all_reduce(in, in_place ? in : out, op).wait();
  }
  std::vector<OwnedTensor> inputs;
  for (int64_t member = 0; member < f.size(); ++member)
    inputs.push_back(input(f, member, which, rows));
  expect_rows(in_place ? in : out, 0, reduced(inputs, op), 0, rows, "all_reduce");
}

void check_all_to_all(Fixture& f, uint64_t which) {
  const bool equal = f.random.next_below(2) == 0;
  const RowCounts table = random_rows(f.random, f.size() * f.size(), equal);  // [from, to]
  const auto cell = [&](int64_t from, int64_t to) { return table[from * f.size() + to]; };
  const auto sent_by = [&](int64_t from) {
    return RowCounts(table.begin() + from * f.size(), table.begin() + (from + 1) * f.size());
  };
  RowCounts receive(f.size());
  for (int64_t from = 0; from < f.size(); ++from) receive[from] = cell(from, f.rank());
  const RowCounts send = sent_by(f.rank());
  const OwnedTensor in = input(f, f.rank(), which, sum_rows(send));
  const OwnedTensor out(f.dtype, {sum_rows(receive) + (equal ? 0 : kSlack), f.columns});
  Companion more(f, which);
  more.make(sum_rows(send), out.get().shape[0]);
  std::vector<RowMove> moves{{in, out}};
  more.add_to(moves);
  {
    const int64_t sent = sum_rows(send) - cell(f.rank(), f.rank());
    const Counted counted(f, CommKind::kAllToAll, sent * row_bytes(in) * std::ssize(moves));
    (equal ? f.group->all_to_all(moves) : f.group->all_to_all_v(moves, send, receive)).wait();
  }
  for (int64_t from = 0; from < f.size(); ++from) {
    const RowCounts theirs = sent_by(from);
    expect_rows(out, rows_before(receive, from), input(f, from, which, sum_rows(theirs)),
                rows_before(theirs, f.rank()), cell(from, f.rank()), "all_to_all");
    more.expect(rows_before(receive, from), from, sum_rows(theirs), rows_before(theirs, f.rank()),
                cell(from, f.rank()));
  }
}

void check_broadcast(Fixture& f, uint64_t which) {
  const auto root = static_cast<int64_t>(f.random.next_below(static_cast<uint64_t>(f.size())));
  const auto rows = static_cast<int64_t>(f.random.next_below(9));
  const OwnedTensor tensor = input(f, f.rank(), which, rows);
  const int64_t bytes = f.rank() == root && f.size() > 1 ? tensor.get().num_bytes() : 0;
  {
    const Counted counted(f, CommKind::kBroadcast, bytes);
    f.group->broadcast(tensor, root).wait();
  }
  expect_rows(tensor, 0, input(f, root, which, rows), 0, rows, "broadcast");
}

// Each member sends to the next one in the ring.
void check_ring(Fixture& f, uint64_t which) {
  if (f.size() == 1) return;
  const auto rows = static_cast<int64_t>(f.random.next_below(9));
  const int64_t before = (f.rank() + f.size() - 1) % f.size();
  const OwnedTensor in = input(f, f.rank(), which, rows);
  const OwnedTensor out(f.dtype, {rows, f.columns});
  {
    const Counted sent(f, CommKind::kSend, in.get().num_bytes());
    const Counted received(f, CommKind::kReceive, 0);
    Pending send = f.group->send(in, (f.rank() + 1) % f.size());
    Pending receive = f.group->receive(out, before);
    send.wait();
    receive.wait();
  }
  expect_rows(out, 0, input(f, before, which, rows), 0, rows, "ring");
}

// A random order of the ranks, cut at random places: this rank's part.
RowCounts random_group(const World& world, Random& random) {
  RowCounts order(static_cast<size_t>(world.size()));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.next_below(i)]);
  RowCounts group;
  bool mine = false;
  for (const int64_t rank : order) {
    if (!group.empty() && random.next_below(4) == 0) {
      if (mine) return group;
      group.clear();
    }
    group.push_back(rank);
    mine = mine || rank == world.rank();
  }
  return group;
}

void check_kind(Fixture& f, uint64_t which) {
  switch (f.random.next_below(7)) {
    case 0:
      return check_all_gather(f, which);
    case 1:
      return check_reduce_scatter(f, which);
    case 2:
      return check_all_reduce(f, which);
    case 3:
      return check_all_to_all(f, which);
    case 4:
      return check_broadcast(f, which);
    case 5:
      return check_ring(f, which);
    default: {
      const Counted counted(f, CommKind::kBarrier, 0);
      f.group->barrier();
    }
  }
}

}  // namespace

void check_random_collectives(World& world, uint64_t seed, int64_t num_rounds, SumOrder order) {
  constexpr std::array kTypes = {DType::kF32, DType::kBF16, DType::kF64, DType::kI32, DType::kI64};
  for (int64_t round = 0; round < num_rounds; ++round) {
    Random random(seed, static_cast<uint64_t>(round));
    const RowCounts ranks = random_group(world, random);
    const uint64_t group_seed = mix(seed, static_cast<uint64_t>(ranks[0]));
    Fixture f{.group = world.make_group("checked", ranks),
              .statistics = &world.statistics(),
              .dtype = kTypes[random.next_below(kTypes.size())],
              .columns = static_cast<int64_t>(random.next_below(5)),
              .seed = mix(group_seed, static_cast<uint64_t>(round)),
              .random = Random(group_seed, static_cast<uint64_t>(round)),
              .order = order};
    f.group->connect_neighbours();
    ASSERT_EQ(f.group->ranks(), ranks);
    ASSERT_EQ(ranks[f.rank()], world.rank());
    for (uint64_t which = 0; which < 10; ++which) check_kind(f, which);
  }
}

void check_messages(World& world, uint64_t seed) {
  const CommunicatorPtr group = world.make_world_group();
  group->connect_neighbours();
  if (world.size() == 1) return;
  Fixture f{group, &world.statistics(), DType::kF32, 3, seed, Random(seed, 0)};
  constexpr int64_t kMessages = 5;
  // Everyone to everyone; even ranks send first, odd ones receive first.
  std::vector<OwnedTensor> tensors;
  std::vector<Pending> pending;
  for (const bool sends : {world.rank() % 2 == 0, world.rank() % 2 == 1}) {
    for (int64_t peer = 0; peer < world.size(); ++peer) {
      for (int64_t k = 0; k < kMessages && peer != world.rank(); ++k) {
        if (sends) {
          tensors.push_back(input(f, world.rank(), static_cast<uint64_t>(k), k * 7));
          pending.push_back(group->send(tensors.back(), peer));
        } else {
          tensors.emplace_back(DType::kF32, Shape{k * 7, 3});
          pending.push_back(group->receive(tensors.back(), peer));
        }
      }
    }
  }
  for (Pending& p : pending) p.wait();
  size_t at = world.rank() % 2 == 1 ? 0 : tensors.size() / 2;
  for (int64_t peer = 0; peer < world.size(); ++peer) {
    for (int64_t k = 0; k < kMessages && peer != world.rank(); ++k)
      expect_rows(tensors[at++], 0, input(f, peer, static_cast<uint64_t>(k), k * 7), 0, k * 7,
                  "message");
  }
}

void check_large(World& world, int64_t bytes) {
  const CommunicatorPtr group = world.make_world_group();
  const int64_t part = bytes / world.size() / 8;
  const OwnedTensor all(DType::kI64, {world.size() * part});
  const OwnedTensor own(DType::kI64, {part});
  const auto value = [&](int64_t rank, int64_t i) { return rank * part + i; };
  for (int64_t i = 0; i < part; ++i) own.get().as<int64_t>()[i] = value(world.rank(), i);
  group->all_gather(own, all).wait();
  bool gathered = true;
  for (int64_t i = 0; i < world.size() * part; ++i)
    gathered = gathered && all.get().as<int64_t>()[i] == i;
  EXPECT_TRUE(gathered);
  group->reduce_scatter(all, own).wait();
  bool summed = true;
  for (int64_t i = 0; i < part; ++i)
    summed = summed && own.get().as<int64_t>()[i] == world.size() * value(world.rank(), i);
  EXPECT_TRUE(summed);
  group->all_reduce(all, all).wait();
  for (int64_t i = 0; i < world.size() * part; ++i)
    summed = summed && all.get().as<int64_t>()[i] == world.size() * i;
  EXPECT_TRUE(summed);
}

void check_sizes(World& world, uint64_t seed) {
  constexpr std::array<int64_t, 9> kSizes = {
      0, 1, 63, 65535, 65536, (1 << 20) - 1, (1 << 20) + 1, 3 << 20, (5 << 20) + 7};
  const CommunicatorPtr group = world.make_world_group();
  const int64_t size = world.size();
  const int64_t rank = world.rank();
  Random random(seed, 0);
  for (int round = 0; round < 6; ++round) {
    RowCounts table(size * size);  // [from, to]
    for (int64_t& cell : table) cell = kSizes[random.next_below(kSizes.size())];
    const RowCounts send(table.begin() + rank * size, table.begin() + (rank + 1) * size);
    RowCounts receive(size);
    for (int64_t from = 0; from < size; ++from) receive[from] = table[from * size + rank];
    const OwnedTensor in(DType::kU8, {sum_rows(send)});
    const OwnedTensor out(DType::kU8, {sum_rows(receive)});
    const auto value = [&](int64_t from, int64_t to, int64_t i) {
      return static_cast<uint8_t>(i * 7 + from * 31 + to * 3 + round);
    };
    for (int64_t to = 0; to < size; ++to) {
      uint8_t* part = in.get().as<uint8_t>() + rows_before(send, to);
      for (int64_t i = 0; i < send[to]; ++i) part[i] = value(rank, to, i);
    }
    group->all_to_all_v(in, out, send, receive).wait();
    for (int64_t from = 0; from < size; ++from) {
      const uint8_t* part = out.get().as<uint8_t>() + rows_before(receive, from);
      int64_t wrong = 0;
      for (int64_t i = 0; i < receive[from]; ++i) wrong += part[i] != value(from, rank, i);
      EXPECT_EQ(wrong, 0) << "of " << receive[from] << " bytes from rank " << from;
    }
  }
}

void check_wait_order(World& world, uint64_t seed) {
  const CommunicatorPtr group = world.make_world_group();
  group->connect_neighbours();
  const int64_t size = world.size();
  Random random(seed, static_cast<uint64_t>(world.rank()));
  std::vector<OwnedTensor> sums;
  std::vector<OwnedTensor> gathered;
  for (int64_t i = 0; i < 6; ++i) {
    sums.emplace_back(DType::kI64, Shape{1000});
    gathered.emplace_back(DType::kI64, Shape{size});
    std::ranges::fill(sums.back().get().span<int64_t>(), world.rank() + i);
  }
  std::vector<Pending> pending;
  for (size_t i = 0; i < 6; ++i) {
    pending.push_back(group->all_reduce(sums[i], sums[i]));
    Tensor own = gathered[i];
    own.shape = {1};
    own.data = row_data(gathered[i], world.rank());
    own.as<int64_t>()[0] = world.rank();
    pending.push_back(group->all_gather(own, gathered[i]));
  }
  // One rank waits for a message while another completes what both began before it.
  OwnedTensor token(DType::kI64, {1});
  if (world.rank() == 0) {
    for (Pending& p : pending) p.wait();
    for (int64_t peer = 1; peer < size; ++peer) group->send(token, peer).wait();
  } else {
    group->receive(token, 0).wait();
    for (size_t i = pending.size(); i > 1; --i)
      std::swap(pending[i - 1], pending[random.next_below(i)]);
    for (Pending& p : pending) p.wait();
  }
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(sums[i].get().as<int64_t>()[999], size * (size - 1) / 2 + size * i);
    EXPECT_EQ(gathered[i].get().as<int64_t>()[size - 1], size - 1);
  }
}

}  // namespace tessera
