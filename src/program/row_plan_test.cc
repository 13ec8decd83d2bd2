#include "program/row_plan.h"

#include <gtest/gtest.h>

#include "ops/activation/activation.h"
#include "ops/permute/permute.h"
#include "ops/route_map/route_map.h"

namespace tessera {
namespace {

/// Rows of 8 tokens for experts 0 and 1 of 8: 16 at most, 4 where routing is balanced.
struct Routed {
  Program program;
  ValueId source, extent, rows;
  size_t last = 0;  ///< the node that makes the rows

  Routed() {
    const ValueId tokens = program.add_input("tokens", {DType::kF32, {8, 32}});
    const ValueId idx = program.add_input("idx", {DType::kI32, {8, 2}});
    const auto map = program.add(
        make_route_map({.num_experts = 8, .top_k = 2, .local_experts = {.begin = 0, .count = 2}}),
        {idx}, {"row_of", "source", "offsets", "extent", "dropped", "counts"});
    extent = map[RouteMapOutput::kExtent];
    source = map[RouteMapOutput::kSourceR];
    rows = program.add1(make_permute(), {tokens, source, map[RouteMapOutput::kRowOfTK]}, "rows");
    last = static_cast<size_t>(std::ssize(program.nodes()) - 1);
  }
  RowPlan plan(const std::vector<bool>& tells, const std::map<ValueId, int64_t>& given = {}) const {
    return {program, plan_memory(program, {}), tells, given};
  }
};

TEST(RowPlan, AValueIsElasticWhereTheHostIsTold) {
  const Routed routed;
  const RowPlan plan = routed.plan({true, false});
  EXPECT_TRUE(plan.has_elastic());
  EXPECT_TRUE(plan.is_elastic(routed.rows));
  EXPECT_EQ(plan.written_by(routed.last), std::vector<ValueId>{routed.rows});
  EXPECT_EQ(plan.balanced().at(routed.extent), 4);
  EXPECT_EQ(plan.find_source(routed.extent)->kind, ExtentSource::Kind::kTold);
  constexpr int64_t kRow = 32 * sizeof(float);
  EXPECT_EQ(plan.skewed_bytes(routed.program, routed.rows, 1, 0), 4 * kRow);
  EXPECT_EQ(plan.skewed_bytes(routed.program, routed.rows, 1.6, 2), 9 * kRow);
  EXPECT_EQ(plan.skewed_bytes(routed.program, routed.rows, 100, 2), 16 * kRow);
}

TEST(RowPlan, OtherValuesTakeTheirBounds) {
  const Routed routed;
  EXPECT_FALSE(routed.plan({true, false}).is_elastic(routed.source))
      << "its rows are known when it is written, not before";
  const RowPlan plan = routed.plan({false, false});
  EXPECT_FALSE(plan.has_elastic());
  EXPECT_EQ(plan.find_source(routed.extent), nullptr);
  EXPECT_EQ(plan.skewed_bytes(routed.program, routed.rows, 1, 0),
            routed.program.type(routed.rows).num_bytes());
}

/// Whoever estimates times knows what comes, though no host does.
TEST(RowPlan, ExpectsRowsThatTheHostDoesNotLearn) {
  const Routed routed;
  const RowPlan plan = routed.plan({false, false});
  EXPECT_TRUE(plan.balanced().empty());
  EXPECT_EQ(plan.expected().at(routed.extent), 4);
  EXPECT_EQ(routed.plan({true, false}).expected(), plan.expected());

  Program later;
  const ValueId extent = later.add_input("extent", {DType::kI64, {1}});
  later.add_input("rows", {DType::kF32, {16, 32}, 0, extent});
  const RowPlan given(later, plan_memory(later, {}), {}, {}, {{extent, 4}});
  EXPECT_EQ(given.expected().at(extent), 4);
  EXPECT_FALSE(given.has_elastic());
}

TEST(RowPlan, ProgramsAreGivenExtents) {
  Program program;
  const ValueId extent = program.add_input("extent", {DType::kI64, {1}});
  const ValueId rows = program.add_input("rows", {DType::kF32, {16, 32}, 0, extent});
  const ValueId out = program.add1(make_activation(Activation::kGelu), {rows}, "out");
  const RowPlan plan(program, plan_memory(program, {}), {false}, {{extent, 5}});
  EXPECT_EQ(plan.find_source(extent)->kind, ExtentSource::Kind::kInput);
  EXPECT_TRUE(plan.is_elastic(out));
  EXPECT_FALSE(plan.is_elastic(rows)) << "whoever binds it gives it memory";
}

}  // namespace
}  // namespace tessera
