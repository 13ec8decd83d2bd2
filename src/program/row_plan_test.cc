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
  EXPECT_EQ(plan.skewed_rows(routed.program, routed.rows, 1), 4);
  EXPECT_EQ(plan.skewed_rows(routed.program, routed.rows, 1.6), 7);
  EXPECT_EQ(plan.skewed_rows(routed.program, routed.rows, 100), 16);
  const ValueType& type = routed.program.type(routed.rows);
  EXPECT_EQ(bytes_of_rows(type, 9), 9 * kRow);
  EXPECT_EQ(bytes_of_rows(type, 18), 16 * kRow);
}

/// Scales stand behind the elements of all rows that may come.
TEST(RowPlan, ScalesLieAtTheBound) {
  const ValueType rows{.dtype = DType::kE4M3, .shape = {100, 48}, .scale = ScaleLayout::row()};
  EXPECT_EQ(ranges_at_bound(rows, 7),
            (std::vector<ByteRange>{{0, 384 + 7 * sizeof(float)}, {4800, 7 * sizeof(float)}}));
  EXPECT_EQ(ranges_at_bound(rows, 0), (std::vector<ByteRange>{{0, 0}, {4800, 0}}));
  EXPECT_EQ(ranges_at_bound(rows, 102),
            (std::vector<ByteRange>{{0, 4800}, {4800, 100 * sizeof(float)}}));
  const ValueType blocks{
      .dtype = DType::kE4M3, .shape = {64, 256}, .scale = ScaleLayout::block(1, 128)};
  EXPECT_EQ(ranges_at_bound(blocks, 3),
            (std::vector<ByteRange>{{0, 768 + 6 * sizeof(float)}, {64 * 256, 6 * sizeof(float)}}));
  const ValueType plain{.dtype = DType::kBF16, .shape = {64, 256}};
  EXPECT_EQ(ranges_at_bound(plain, 3), (std::vector<ByteRange>{{0, 3 * 512}}));
}

TEST(RowPlan, OtherValuesTakeTheirBounds) {
  const Routed routed;
  EXPECT_FALSE(routed.plan({true, false}).is_elastic(routed.source))
      << "its rows are known when it is written, not before";
  const RowPlan plan = routed.plan({false, false});
  EXPECT_FALSE(plan.has_elastic());
  EXPECT_EQ(plan.find_source(routed.extent), nullptr);
  EXPECT_FALSE(plan.is_elastic(routed.rows));
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
