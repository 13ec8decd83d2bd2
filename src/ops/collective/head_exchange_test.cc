#include "ops/collective/head_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"
#include "ops/collective/collective_testing.h"
#include "ops/testing/transpose.h"

namespace tessera::testing {
namespace {

constexpr uint64_t kSeed = 23;

struct Case {
  int64_t ranks;
  int64_t tokens;  ///< of one rank
  int64_t heads;   ///< of one rank, after the exchange
  int64_t head_size;
  DType dtype;

  int64_t local_width() const { return heads * head_size; }
  int64_t width() const { return ranks * local_width(); }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int64_t ranks = 1; ranks <= 5; ++ranks) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t tokens : {0, 1, 6}) {
        all.push_back({ranks, tokens, 1, 3, dtype});
        all.push_back({ranks, tokens, 2, 8, dtype});
      }
    }
  }
  return all;
}

/// Token t of all ranks' tokens, elements [begin, begin + count).
std::vector<float> cut(const Case& c, int64_t token, int64_t begin, int64_t count) {
  const auto rows = integers_of(token / c.tokens, c.tokens * c.width(), kSeed);
  return rows_of(rows, 1, token % c.tokens * c.width() + begin, count);
}

TEST(GatherHeads, EveryRankGetsAllTokensOfItsHeads) {
  for (const Case& c : cases()) {
    run_thread_world(c.ranks, [&](World& world) {
      std::vector<float> expected;
      for (int64_t token = 0; token < c.ranks * c.tokens; ++token)
        append(expected, cut(c, token, world.rank() * c.local_width(), c.local_width()));
      const auto outputs = run_operator(
          *make_gather_heads(world.make_world_group(), c.ranks * c.heads), collective_kernels(),
          list_inputs(
              TestInput{make_tensor(c.dtype, {c.tokens, c.width()},
                                    integers_of(world.rank(), c.tokens * c.width(), kSeed))}));
      expect_bitwise_equal(outputs[0],
                           make_tensor(c.dtype, {c.ranks * c.tokens, c.local_width()}, expected),
                           fmt::format("rank {} of {}", world.rank(), c.ranks));
    });
  }
}

TEST(ScatterHeads, IsTheWayBack) {
  for (const Case& c : cases()) {
    run_thread_world(c.ranks, [&](World& world) {
      const CommunicatorPtr comm = world.make_world_group();
      const OwnedTensor x = make_tensor(c.dtype, {c.tokens, c.width()},
                                        integers_of(world.rank(), c.tokens * c.width(), kSeed));
      auto inputs = list_inputs(TestInput{make_tensor(
          c.dtype, {c.tokens, c.width()}, integers_of(world.rank(), c.tokens * c.width(), kSeed))});
      auto gathered =
          run_operator(*make_gather_heads(comm, c.ranks * c.heads), collective_kernels(), inputs);
      const auto back =
          run_operator(*make_scatter_heads(comm, c.ranks * c.heads), collective_kernels(),
                       list_inputs(TestInput{std::move(gathered[0])}));
      expect_bitwise_equal(back[0], x, fmt::format("rank {} of {}", world.rank(), c.ranks));
    });
  }
}

TEST(HeadExchange, GradientsAreTransposes) {
  for (const Case& c : cases()) {
    if (c.tokens == 0) continue;
    for (const bool gather : {true, false}) {
      const auto build = [&](World& world) {
        LinearMap map;
        const CommunicatorPtr comm = world.make_world_group();
        const Shape shape =
            gather ? Shape{c.tokens, c.width()} : Shape{c.ranks * c.tokens, c.local_width()};
        map.x = map.program.add_input("x", {c.dtype, shape});
        map.y = map.program.add1(gather ? make_gather_heads(comm, c.ranks * c.heads)
                                        : make_scatter_heads(comm, c.ranks * c.heads),
                                 {map.x}, "y");
        map.program.set_outputs({map.y});
        return map;
      };
      check_transpose(c.ranks, build, collective_kernels(), kSeed);
    }
  }
}

TEST(HeadExchange, RefusesHeadsThatDoNotDivide) {
  run_thread_world(2, [](World& world) {
    const CommunicatorPtr comm = world.make_world_group();
    EXPECT_THAT([&] { make_gather_heads(comm, 3); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(
                    "3 heads cannot be spread evenly over the 2 ranks of group 'world'")));
    const auto refuses = [](const OperatorPtr& op, const ValueType& type, const char* message) {
      const ValueType inputs[] = {type};
      EXPECT_THAT([&] { op->infer(inputs); },
                  ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
    };
    refuses(make_gather_heads(comm, 4), {DType::kF32, {3, 6}}, "takes [tokens, 4 heads]");
    refuses(make_scatter_heads(comm, 4), {DType::kF32, {3, 6}}, "the 3 tokens");
    EXPECT_EQ(make_scatter_heads(comm, 4)->attributes(), "group=world size=2 heads=4");
  });
}

}  // namespace
}  // namespace tessera::testing
