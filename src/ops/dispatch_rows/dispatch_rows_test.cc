#include "ops/dispatch_rows/dispatch_rows.h"

#include <gtest/gtest.h>

#include <numeric>

#include "comm/thread/thread_world.h"
#include "ops/collective/collective_testing.h"
#include "ops/permute/permute.h"

namespace tessera::testing {
namespace {

using Counts = std::vector<int64_t>;

KernelTable kernels() {
  KernelTable table = collective_kernels();
  add_permute_cpu(table);
  add_dispatch_rows_cpu(table);
  return table;
}

/// What a rank has: tokens, and where the rows that it sends are among their choices.
struct RankRows {
  int64_t tokens;
  int64_t choices;
  std::vector<Counts> sent;  ///< from rank, to rank
  int64_t rank;

  RankRows(int64_t num_ranks, int64_t rank, uint64_t seed)
      : tokens(static_cast<int64_t>(seed % 5)),
        choices(seed % 2 == 0 ? 1 : 3),
        sent(num_ranks),
        rank(rank) {
    Random random(seed, 7);
    for (Counts& from : sent) {
      for (int64_t to = 0; to < num_ranks; ++to)
        from.push_back(random.next_below(3) == 0 ? 0 : static_cast<int64_t>(random.next_below(5)));
    }
  }
  Counts received() const {
    Counts counts;
    for (const Counts& from : sent) counts.push_back(from[rank]);
    return counts;
  }
  /// Some rows are of no token.
  std::vector<int32_t> source() const {
    Random random(static_cast<uint64_t>(rank), 9);
    std::vector<int32_t> rows;
    const int64_t count = std::accumulate(sent[rank].begin(), sent[rank].end(), int64_t{0});
    for (int64_t r = 0; r < count; ++r) {
      const bool none = tokens == 0 || random.next_below(4) == 0;
      rows.push_back(none ? -1 : static_cast<int32_t>(random.next_below(tokens * choices)));
    }
    return rows;
  }
};

TestInput constant(OwnedTensor tensor) {
  return {std::move(tensor), Role::kConstant, "map"};
}

void check_rank(World& world, const RankRows& r, DType dtype) {
  constexpr int64_t kWidth = 6;
  const auto group = world.make_world_group();
  const Counts received = r.received();
  const int64_t arriving = std::accumulate(received.begin(), received.end(), int64_t{0});
  const std::vector<int32_t> source = r.source();
  const auto rows = [&] {
    return TestInput{
        make_tensor(dtype, {r.tokens, kWidth}, integers_of(r.rank, r.tokens * kWidth, 3))};
  };
  const auto map = [&] { return constant(tensor_of_i32({std::ssize(source)}, source)); };
  const auto row_of = [&] {
    return constant(
        tensor_of_i32({r.tokens, r.choices}, std::vector<int32_t>(r.tokens * r.choices, -1)));
  };
  const auto counts = [&](const Counts& values) {
    return constant(tensor_of_i64({std::ssize(values)}, values));
  };
  auto permuted = run_operator(*make_permute(), kernels(), list_inputs(rows(), map(), row_of()));
  const auto expected =
      run_operator(*make_all_to_all_v(group, arriving + 2), kernels(),
                   list_inputs(TestInput{std::move(permuted[0])}, counts(r.sent[r.rank]),
                               counts(received), counts({arriving})));
  const auto found = run_operator(*make_dispatch_rows(group, arriving + 2), kernels(),
                                  list_inputs(rows(), counts(r.sent[r.rank]), counts(received),
                                              counts({arriving}), map(), row_of()));
  expect_bitwise_equal(found[0], expected[0], "rows that arrived");
}

TEST(DispatchRows, GivesWhatPermuteAndTheExchangeGive) {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      SCOPED_TRACE(fmt::format("{} ranks, seed {}", ranks, seed));
      run_thread_world(ranks, [&](World& world) {
        const RankRows rows(ranks, world.rank(), seed);
        for (const DType dtype : {DType::kF32, DType::kBF16}) check_rank(world, rows, dtype);
      });
    }
  }
}

}  // namespace
}  // namespace tessera::testing
