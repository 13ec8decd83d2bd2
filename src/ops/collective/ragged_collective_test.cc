#include "ops/collective/ragged_collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "comm/thread/thread_world.h"
#include "ops/collective/collective_testing.h"
#include "ops/testing/transpose.h"

namespace tessera::testing {
namespace {

constexpr int64_t kSpareRows = 3;  ///< of bounds over what arrives

using Counts = std::vector<int64_t>;

int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}
int64_t before(const Counts& counts, int64_t rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
}

/// Which numbers of rows go where, the same for all who ask with the same seed. Some are 0.
struct Traffic {
  int64_t ranks;
  uint64_t seed;
  std::vector<Counts> rows;  ///< from rank, to rank

  Traffic(int64_t num_ranks, uint64_t traffic_seed)
      : ranks(num_ranks), seed(traffic_seed), rows(static_cast<size_t>(num_ranks)) {
    Random random(seed, 99);
    for (Counts& from : rows) {
      for (int64_t to = 0; to < ranks; ++to)
        from.push_back(random.next_below(3) == 0 ? 0 : static_cast<int64_t>(random.next_below(6)));
    }
  }
  const Counts& sent(int64_t rank) const { return rows[rank]; }
  Counts received(int64_t rank) const {
    Counts counts;
    for (const Counts& from : rows) counts.push_back(from[rank]);
    return counts;
  }
  /// Counts that all ranks share, for gathering.
  const Counts& shared() const { return rows[0]; }
  int64_t own(int64_t rank) const { return shared()[rank]; }
};

TestInput counts_input(const Counts& counts) {
  return {tensor_of_i64({std::ssize(counts)}, counts), Role::kConstant, "counts"};
}

/// Runs an operator on the first rows of each rank's integers, more than are sent, once with an
/// extent (`arriving` rows) and once with a fixed number of rows, which zeros fill up.
struct RaggedCheck {
  DType dtype;
  int64_t width;
  uint64_t seed;

  int64_t row_elements() const { return std::max<int64_t>(width, 1); }
  std::vector<float> rows(int64_t rank, int64_t count) const {
    return integers_of(rank, count * row_elements(), seed);
  }
  void run(const OperatorPtr& op, int64_t rank, int64_t rows_in, const std::vector<Counts>& counts,
           std::vector<float> expected) const {
    const int64_t arriving = std::ssize(expected) / row_elements();
    const auto inputs = [&](bool ragged) {
      std::vector<TestInput> list = list_inputs(
          TestInput{make_tensor(dtype, shape_of_rows(rows_in, width), rows(rank, rows_in))});
      for (const Counts& c : counts) list.push_back(counts_input(c));
      if (ragged) list.push_back(counts_input({arriving}));
      return list;
    };
    const auto with_extent = run_operator(*op, collective_kernels(), inputs(true));
    expect_bitwise_equal(with_extent[0],
                         make_tensor(dtype, shape_of_rows(arriving, width), expected), "ragged");
    const auto fixed = run_operator(*op, collective_kernels(), inputs(false));
    const int64_t max_rows = static_cast<const RaggedCollective&>(*op).max_rows();
    expected.resize(max_rows * row_elements(), 0.0F);
    expect_bitwise_equal(fixed[0], make_tensor(dtype, shape_of_rows(max_rows, width), expected),
                         "fixed");
  }
};

/// Calls body(traffic, check) for random traffic of 1 to 5 ranks, of rows and of numbers.
void for_each_traffic(const std::vector<DType>& dtypes,
                      const std::function<void(const Traffic&, const RaggedCheck&)>& body) {
  for (int64_t ranks = 1; ranks <= 5; ++ranks) {
    for (const DType dtype : dtypes) {
      for (const int64_t width : {0, 5}) {
        for (uint64_t seed = 1; seed <= 3; ++seed)
          body(Traffic(ranks, seed), RaggedCheck{dtype, width, seed});
      }
    }
  }
}

TEST(AllToAllV, RowsArriveInTheOrderOfTheirSenders) {
  for_each_traffic(
      {DType::kF32, DType::kBF16, DType::kI32}, [](const Traffic& t, const RaggedCheck& check) {
        run_thread_world(t.ranks, [&](World& world) {
          const int64_t rank = world.rank();
          std::vector<float> expected;
          for (int64_t from = 0; from < t.ranks; ++from) {
            append(expected, rows_of(check.rows(from, total(t.sent(from))), check.row_elements(),
                                     before(t.sent(from), rank), t.sent(from)[rank]));
          }
          const auto op =
              make_all_to_all_v(world.make_world_group(), total(t.received(rank)) + kSpareRows);
          check.run(op, rank, total(t.sent(rank)) + 1, {t.sent(rank), t.received(rank)}, expected);
        });
      });
}

TEST(AllGatherV, PutsCountedRowsOneAfterTheOther) {
  for_each_traffic({DType::kF32, DType::kBF16, DType::kI32}, [](const Traffic& t,
                                                                const RaggedCheck& check) {
    run_thread_world(t.ranks, [&](World& world) {
      std::vector<float> expected;
      for (int64_t from = 0; from < t.ranks; ++from) {
        append(expected, check.rows(from, t.own(from)));
      }
      const auto op = make_all_gather_v(world.make_world_group(), total(t.shared()) + kSpareRows);
      check.run(op, world.rank(), t.own(world.rank()) + 1, {t.shared()}, expected);
    });
  });
}

TEST(ReduceScatterV, SumsCountedRows) {
  for_each_traffic({DType::kF32, DType::kBF16}, [](const Traffic& t, const RaggedCheck& check) {
    run_thread_world(t.ranks, [&](World& world) {
      const int64_t rank = world.rank();
      std::vector<float> expected(t.own(rank) * check.row_elements());
      for (int64_t from = 0; from < t.ranks; ++from) {
        add_to(expected, rows_of(check.rows(from, total(t.shared())), check.row_elements(),
                                 before(t.shared(), rank), t.own(rank)));
      }
      const auto op = make_reduce_scatter_v(world.make_world_group(), t.own(rank) + kSpareRows);
      check.run(op, rank, total(t.shared()) + 1, {t.shared()}, expected);
    });
  });
}

/// The program of one ragged operator; x and y are ragged or have the bounds' rows.
struct RaggedProgram {
  LinearMap map;
  std::vector<std::pair<ValueId, Counts>> constants;

  ValueId add_constant(const std::string& name, const Counts& counts) {
    const ValueId id = map.program.add_input(name, {DType::kI64, {std::ssize(counts)}});
    constants.emplace_back(id, counts);
    return id;
  }
  void add_x(const RaggedCheck& check, int64_t rows, bool ragged) {
    ValueType type{check.dtype, shape_of_rows(rows + kSpareRows, check.width)};
    if (ragged) {
      type.ragged_dim = 0;
      type.extent = add_constant("x_extent", {rows});
    }
    map.x = map.program.add_input("x", type);
  }
  void add_y(OperatorPtr op, const std::vector<Counts>& counts, int64_t rows, bool ragged) {
    std::vector<ValueId> inputs = {map.x};
    for (const Counts& c : counts)
      inputs.push_back(add_constant(fmt::format("counts{}", inputs.size()), c));
    if (ragged) inputs.push_back(add_constant("y_extent", {rows}));
    map.y = map.program.add1(std::move(op), inputs, "y");
    map.program.set_outputs({map.y});
    map.fill = [all = constants](const ProgramRun& run) {
      for (const auto& [id, values] : all)
        std::ranges::copy(values, run.value(id).span<int64_t>().begin());
    };
  }
};

void check_ragged_transpose(const std::function<void(RaggedProgram&, const Traffic&,
                                                     const RaggedCheck&, World&, bool)>& build) {
  for_each_traffic({DType::kF32, DType::kBF16}, [&](const Traffic& t, const RaggedCheck& check) {
    for (const bool ragged : {true, false}) {
      const auto build_map = [&](World& world) {
        RaggedProgram program;
        build(program, t, check, world, ragged);
        return std::move(program.map);
      };
      check_transpose(t.ranks, build_map, collective_kernels(), t.seed);
    }
  });
}

TEST(AllToAllV, GradientIsTheTranspose) {
  check_ragged_transpose([](RaggedProgram& program, const Traffic& t, const RaggedCheck& check,
                            World& world, bool ragged) {
    const Counts send = t.sent(world.rank());
    const Counts receive = t.received(world.rank());
    program.add_x(check, total(send), ragged);
    program.add_y(make_all_to_all_v(world.make_world_group(), total(receive) + kSpareRows),
                  {send, receive}, total(receive), ragged);
  });
}

TEST(AllGatherV, GradientIsTheTranspose) {
  check_ragged_transpose([](RaggedProgram& program, const Traffic& t, const RaggedCheck& check,
                            World& world, bool ragged) {
    program.add_x(check, t.own(world.rank()), ragged);
    program.add_y(make_all_gather_v(world.make_world_group(), total(t.shared()) + kSpareRows),
                  {t.shared()}, total(t.shared()), ragged);
  });
}

TEST(ReduceScatterV, GradientIsTheTranspose) {
  check_ragged_transpose([](RaggedProgram& program, const Traffic& t, const RaggedCheck& check,
                            World& world, bool ragged) {
    program.add_x(check, total(t.shared()), ragged);
    program.add_y(make_reduce_scatter_v(world.make_world_group(), t.own(world.rank()) + kSpareRows),
                  {t.shared()}, t.own(world.rank()), ragged);
  });
}

TEST(RaggedCollectives, ShapeRules) {
  run_thread_world(2, [](World& world) {
    const CommunicatorPtr comm = world.make_world_group();
    const ValueType x{DType::kBF16, {6, 4}, 0, 9};
    const ValueType counts{DType::kI64, {2}};
    const ValueType extent{DType::kI64, {1}};
    const OperatorPtr op = make_all_to_all_v(comm, 10);
    const std::vector<ValueType> inputs = {x, counts, counts, extent};
    EXPECT_EQ(op->infer(inputs)[0], (ValueType{DType::kBF16, {10, 4}, 0, Extent::own_input(3)}));
    EXPECT_EQ(op->infer(std::span(inputs).first(3))[0], (ValueType{DType::kBF16, {10, 4}}));
    EXPECT_EQ(op->attributes(), "group=world size=2 max_rows=10");
    const auto refuses = [&](const OperatorPtr& other, const std::vector<ValueType>& wrong,
                             const char* message) {
      EXPECT_THAT([&] { other->infer(wrong); },
                  ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
    };
    refuses(op, {x, counts}, "takes 3 inputs, and one more for a ragged output, got 2");
    refuses(op, {x, counts, extent}, "the counts of rows must be i64 [2], got i64 [1]");
    refuses(op, {x, counts, counts, counts}, "the extent must be i64 [1]");
    refuses(make_all_gather_v(comm, 3), {{DType::kF32, {6, 4}, 1, 9}, counts}, "must have rows");
    refuses(make_reduce_scatter_v(comm, 3), {with_dtype(x, DType::kU8), counts}, "cannot sum");
    EXPECT_THROW(make_all_to_all_v(comm, -1), InternalError);
  });
}

/// The bytes of a dispatch are those of the rows that leave, not those of the bound.
TEST(AllToAllV, CountsTheBytesThatLeave) {
  run_thread_world(3, [](World& world) {
    const Traffic t(3, 4);
    const int64_t rank = world.rank();
    const OperatorPtr op = make_all_to_all_v(world.make_world_group(), 100);
    const RaggedCheck check{DType::kF32, 4, 4};
    run_operator(*op, collective_kernels(),
                 list_inputs(TestInput{make_tensor(DType::kF32, {100, 4}, check.rows(rank, 100))},
                             counts_input(t.sent(rank)), counts_input(t.received(rank))));
    const int64_t leaving = total(t.sent(rank)) - t.sent(rank)[rank];
    EXPECT_EQ(world.statistics().count("world", CommKind::kAllToAll).bytes, leaving * 4 * 4);
  });
}

}  // namespace
}  // namespace tessera::testing
