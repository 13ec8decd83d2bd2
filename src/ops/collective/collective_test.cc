#include "ops/collective/collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"
#include "ops/collective/collective_testing.h"
#include "ops/testing/transpose.h"

namespace tessera::testing {
namespace {

constexpr uint64_t kSeed = 17;

struct Case {
  int64_t ranks;
  int64_t rows;   ///< of one rank's part
  int64_t width;  ///< 0: rank-1 values
  DType dtype;
  int64_t row_elements() const { return std::max<int64_t>(width, 1); }
};

std::vector<Case> cases(const std::vector<DType>& dtypes) {
  std::vector<Case> all;
  for (int64_t ranks = 1; ranks <= 5; ++ranks) {
    for (const DType dtype : dtypes) {
      for (const int64_t rows : {0, 1, 3, 8}) {
        for (const int64_t width : {0, 1, 7}) all.push_back({ranks, rows, width, dtype});
      }
    }
  }
  return all;
}

/// Runs `op` on every rank on its integers and compares with expected(rank).
void check_values(const Case& c, int64_t rows_in, int64_t rows_out,
                  OperatorPtr (*make)(CommunicatorPtr),
                  const std::function<std::vector<float>(int64_t rank)>& expected) {
  run_thread_world(c.ranks, [&](World& world) {
    const OperatorPtr op = make(world.make_world_group());
    const auto values = integers_of(world.rank(), rows_in * c.row_elements(), kSeed);
    const auto outputs = run_operator(
        *op, collective_kernels(),
        list_inputs(TestInput{make_tensor(c.dtype, shape_of_rows(rows_in, c.width), values)}));
    expect_bitwise_equal(
        outputs[0], make_tensor(c.dtype, shape_of_rows(rows_out, c.width), expected(world.rank())),
        fmt::format("{} of {} rows of {}, rank {} of {}", op->name(), c.rows, c.width, world.rank(),
                    c.ranks));
  });
}

TEST(AllGather, PutsTheRanksRowsOneAfterTheOther) {
  for (const Case& c : cases({DType::kF32, DType::kBF16, DType::kI32, DType::kI64})) {
    check_values(c, c.rows, c.rows * c.ranks, make_all_gather, [&](int64_t /*rank*/) {
      std::vector<float> all;
      for (int64_t from = 0; from < c.ranks; ++from)
        append(all, integers_of(from, c.rows * c.row_elements(), kSeed));
      return all;
    });
  }
}

TEST(ReduceScatter, SumsTheRanksParts) {
  for (const Case& c : cases({DType::kF32, DType::kBF16, DType::kI64})) {
    check_values(c, c.rows * c.ranks, c.rows, make_reduce_scatter, [&](int64_t rank) {
      std::vector<float> sum(c.rows * c.row_elements(), 0.0F);
      for (int64_t from = 0; from < c.ranks; ++from) {
        const auto values = integers_of(from, c.rows * c.ranks * c.row_elements(), kSeed);
        add_to(sum, rows_of(values, c.row_elements(), rank * c.rows, c.rows));
      }
      return sum;
    });
  }
}

TEST(AllReduceConstant, SumsOverTheRanks) {
  for (const Case& c : cases({DType::kF32, DType::kI32, DType::kI64})) {
    check_values(c, c.rows, c.rows, make_all_reduce_constant, [&](int64_t /*rank*/) {
      std::vector<float> sum(c.rows * c.row_elements(), 0.0F);
      for (int64_t from = 0; from < c.ranks; ++from)
        add_to(sum, integers_of(from, c.rows * c.row_elements(), kSeed));
      return sum;
    });
  }
}

TEST(AllToAll, SendsPartsToTheirRanks) {
  for (const Case& c : cases({DType::kF32, DType::kBF16, DType::kI32})) {
    check_values(c, c.rows * c.ranks, c.rows * c.ranks, make_all_to_all, [&](int64_t rank) {
      std::vector<float> all;
      for (int64_t from = 0; from < c.ranks; ++from) {
        const auto values = integers_of(from, c.rows * c.ranks * c.row_elements(), kSeed);
        append(all, rows_of(values, c.row_elements(), rank * c.rows, c.rows));
      }
      return all;
    });
  }
}

TEST(Collectives, GradientsAreTransposes) {
  for (OperatorPtr (*make)(CommunicatorPtr) :
       {make_all_gather, make_reduce_scatter, make_all_to_all}) {
    for (const Case& c : cases({DType::kF32, DType::kBF16})) {
      if (c.rows == 0) continue;
      const auto build = [&](World& world) {
        LinearMap map;
        map.x = map.program.add_input("x", {c.dtype, shape_of_rows(c.rows * c.ranks, c.width)});
        map.y = map.program.add1(make(world.make_world_group()), {map.x}, "y");
        map.program.set_outputs({map.y});
        return map;
      };
      check_transpose(c.ranks, build, collective_kernels(), kSeed);
    }
  }
}

/// Of the sum of x and the all-reduced x, the gradient is that of the first term.
TEST(AllReduceConstant, IsConstantToTheGradient) {
  run_thread_world(2, [](World& world) {
    Program program;
    const ValueId x = program.add_input("x", {DType::kF32, {3}});
    const ValueId total =
        program.add1(make_all_reduce_constant(world.make_world_group()), {x}, "total");
    const ValueId y = program.add1(make_all_gather(world.make_world_group()), {x}, "y");
    program.set_outputs({total, y});
    const Backward backward = differentiate(program, {{total, y}, {x}});
    ASSERT_EQ(backward.program.nodes().size(), 1U);
    EXPECT_EQ(backward.program.nodes()[0].op->name(), "reduce_scatter");
  });
}

TEST(Collectives, ShapeRules) {
  run_thread_world(3, [](World& world) {
    const CommunicatorPtr comm = world.make_world_group();
    const auto refuses = [](const OperatorPtr& op, const ValueType& type, const char* message) {
      const ValueType inputs[] = {type};
      EXPECT_THAT([&] { op->infer(inputs); },
                  ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
    };
    const ValueType ragged{DType::kF32, {6, 2}, 0, 5};
    refuses(make_all_gather(comm), ragged, "all_gather: input 0 must have rows, not ragged ones");
    refuses(make_all_gather(comm), {DType::kF32, {}}, "must have rows");
    refuses(make_reduce_scatter(comm), {DType::kF32, {4, 2}},
            "the 4 rows of f32 [4, 2] do not divide into a part for each of the 3 ranks of group "
            "'world'");
    refuses(make_reduce_scatter(comm), {DType::kU8, {3}}, "cannot sum elements of type u8");
    refuses(make_all_to_all(comm), {DType::kF32, {5}}, "do not divide");
    refuses(make_all_reduce_constant(comm), {DType::kBF16, {4}}, "takes f32, f64, i32 or i64");
    EXPECT_EQ(make_all_gather(comm)->attributes(), "group=world size=3");
  });
  EXPECT_THROW(make_all_gather(nullptr), InternalError);
}

}  // namespace
}  // namespace tessera::testing
