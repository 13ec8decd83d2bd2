#include "program/fusion/fuse_gathers.h"

#include <gtest/gtest.h>

#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/permute/permute.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/route_map/route_map.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"
#include "ops/testing/shadow_backend.h"
#include "program/compile/recompute.h"
#include "program/memory_plan.h"

namespace tessera {
namespace {

constexpr int64_t kTokens = 6;
constexpr int64_t kWidth = 10;
constexpr int64_t kExperts = 3;
constexpr int64_t kSize = 4;

/// Tokens routed to experts, and their products.
struct Parts {
  Program program{"gathers"};
  int64_t size;
  ValueId x, idx, weight, offsets, source, row_of;

  explicit Parts(int64_t top_k = 2, bool ragged = false, double capacity_factor = 0,
                 int64_t size = kSize)
      : size(size) {
    ValueType type{DType::kF32, {kTokens, kWidth}};
    if (ragged) {
      type.ragged_dim = 0;
      type.extent = program.add_input("tokens", {DType::kI64, {1}});
    }
    x = program.add_input("x", type);
    ValueType per_token = with_last_dim(with_dtype(type, DType::kI32), top_k);
    if (top_k == 1) per_token.shape = {kTokens};
    idx = program.add_input("idx", per_token);
    weight = program.add_weight("weight", {DType::kF32, {kExperts * size, kWidth}});
    std::vector<ValueId> inputs = {idx};
    if (capacity_factor > 0)
      inputs.push_back(program.add_input("probs", with_dtype(per_token, DType::kF32)));
    const auto map = program.add(
        make_route_map(
            {.num_experts = kExperts, .top_k = top_k, .capacity_factor = capacity_factor}),
        inputs, {"row_of", "source", "offsets"});
    row_of = map[RouteMapOutput::kRowOfTK];
    source = map[RouteMapOutput::kSourceR];
    offsets = map[RouteMapOutput::kOffsets];
  }

  ValueId permute(ValueId from) {
    return program.add1(make_permute(), {from, source, row_of}, "rows");
  }
  ValueId product(ValueId rows, GroupedSide side = GroupedSide::kOut) {
    return program.add1(make_grouped_matmul({std::vector<int64_t>(kExperts, size), side}),
                        {rows, weight, offsets}, "product");
  }
  ValueId unpermute(ValueId rows) {
    return program.add1(make_unpermute(), {rows, row_of, source}, "sum");
  }
  Program with_outputs(std::vector<ValueId> outputs) {
    program.set_outputs(std::move(outputs));
    return program;
  }
};

/// The operators of a program after route_map; those that gather have a "+".
std::vector<std::string> names_of(const Program& program) {
  std::vector<std::string> names;
  for (const Node& node : program.nodes()) {
    const bool gathers = node.op->attributes().ends_with("gather");
    if (node.op->name() != "route_map")
      names.push_back(std::string(node.op->name()) + (gathers ? "+" : ""));
  }
  return names;
}

std::vector<std::string> fused(const Program& program, GatherFusion which = GatherFusion::kAlways) {
  return names_of(
      fuse_gathers(program, which, Backend(make_cpu_kernels()), {.differentiated = true}));
}

using Names = std::vector<std::string>;

TEST(FuseGathers, AProductTakesWhatItAloneReads) {
  for (const int64_t top_k : {1, 2}) {
    for (const bool ragged : {false, true}) {
      Parts parts(top_k, ragged);
      const ValueId y = parts.product(parts.permute(parts.x));
      EXPECT_EQ(fused(parts.with_outputs({y})), (Names{"grouped_matmul+"}));
    }
  }
}

TEST(FuseGathers, AllReadersTakeItOrNone) {
  Parts two;
  const ValueId rows = two.permute(two.x);
  EXPECT_EQ(fused(two.with_outputs({two.product(rows), two.product(rows)})),
            (Names{"grouped_matmul+", "grouped_matmul+"}));
  Parts other;
  const ValueId read = other.permute(other.x);
  const ValueId product = other.product(read);
  EXPECT_EQ(fused(other.with_outputs({product, other.unpermute(read)})),
            (Names{"permute", "grouped_matmul", "unpermute"}));
}

TEST(FuseGathers, OneAfterTheOther) {
  Parts parts;
  const ValueId narrow = parts.product(parts.permute(parts.x));
  const ValueId sum = parts.unpermute(parts.product(narrow, GroupedSide::kIn));
  const ValueId y = parts.product(parts.permute(sum));
  EXPECT_EQ(fused(parts.with_outputs({y})),
            (Names{"grouped_matmul+", "grouped_matmul", "unpermute", "grouped_matmul+"}));
}

TEST(FuseGathers, OutputsAndRowsThatNobodyReadsStay) {
  Parts output;
  const ValueId rows = output.permute(output.x);
  EXPECT_EQ(fused(output.with_outputs({output.product(rows), rows})),
            (Names{"permute", "grouped_matmul"}));
  Parts unread;
  unread.permute(unread.x);
  EXPECT_EQ(fused(unread.with_outputs({})), (Names{"permute"}));
}

/// What is gathered from would live, or be kept, in the place of fewer rows.
TEST(FuseGathers, NothingLargerIsKept) {
  Parts dropping(1, false, 0.5);
  const ValueId rows = dropping.permute(dropping.x);
  ASSERT_LT(dropping.program.type(rows).shape[0], kTokens);
  EXPECT_EQ(fused(dropping.with_outputs({dropping.product(rows)})),
            (Names{"permute", "grouped_matmul"}));
}

TEST(FuseGathers, AutoTakesWhatCostsLessThanTheRowsAndNeverOnTheHost) {
  const Names plain = {"permute", "grouped_matmul"};
  const Backend device = testing::make_shadow_backend(make_cpu_kernels());
  for (const int64_t size : {int64_t{4}, int64_t{8192}}) {
    Parts parts(2, false, 0, size);
    const ValueId rows = parts.permute(parts.x);
    const Program program = parts.with_outputs({parts.product(rows)});
    EXPECT_EQ(fused(program, GatherFusion::kNever), plain);
    EXPECT_EQ(fused(program, GatherFusion::kAuto), plain);
    const bool few_features = size == 4;
    EXPECT_EQ(
        names_of(fuse_gathers(program, GatherFusion::kAuto, device, {.differentiated = true})),
        few_features ? Names{"grouped_matmul+"} : plain);
    EXPECT_EQ(
        names_of(fuse_gathers(program, GatherFusion::kNever, device, {.differentiated = true})),
        plain);
  }
}

/// A size between those for which the gradient's part of the cost does not and does count.
TEST(FuseGathers, AutoCountsAllThatWillGather) {
  const Backend device = testing::make_shadow_backend(make_cpu_kernels());
  bool one_more = false;
  for (int64_t size = 4; size < 16384; size += size / 4) {
    Parts parts(2, false, 0, size);
    const ValueId rows = parts.permute(parts.x);
    const Program program = parts.with_outputs({parts.product(rows)});
    const auto names = [&](bool differentiated) {
      return names_of(
          fuse_gathers(program, GatherFusion::kAuto, device, {.differentiated = differentiated}));
    };
    EXPECT_TRUE(names(true) == names(false) || names(false) == Names{"grouped_matmul+"});
    one_more |= names(true) != names(false);
  }
  EXPECT_TRUE(one_more);
}

/// The backward program of what a layer does: fc1, fc2 and the sum of each token's rows.
TEST(FuseGathers, OfTheGradientToo) {
  Parts parts;
  const ValueId fc1 = parts.product(parts.permute(parts.x));
  const ValueId fc2 = parts.program.add_weight("fc2", {DType::kF32, {kExperts * kSize, kWidth}});
  const ValueId out = parts.program.add1(
      make_grouped_matmul({std::vector<int64_t>(kExperts, kSize), GroupedSide::kIn}),
      {fc1, fc2, parts.offsets}, "out");
  const ValueId y = parts.unpermute(out);
  const DifferentiateRequest request{.outputs = {y}, .inputs = {parts.x}};
  const Backend backend(make_cpu_kernels());
  const Program plain = parts.with_outputs({y});
  const Backward kept = differentiate(plain, request);
  const Program forward =
      fuse_gathers(plain, GatherFusion::kAlways, backend, {.differentiated = true});
  const Backward backward = differentiate(forward, request);
  EXPECT_EQ(names_of(fuse_gathers(backward.program, GatherFusion::kAlways, backend, {})),
            (Names{"grouped_matmul+", "grouped_matmul_wgrad+", "grouped_matmul", "unpermute",
                   "grouped_matmul_wgrad+"}));
  // x is an input, which is there anyway.
  EXPECT_EQ(kept.saved_bytes() - backward.saved_bytes(),
            parts.program.type(parts.program.find("rows")).num_bytes());
}

/// The backward pass decides anew: of what it recomputes the gradient of a weight is the only
/// reader.
TEST(FuseGathers, OfRowsThatAreRecomputed) {
  Parts parts(2, false, 0, 3500);
  const ValueId rows = parts.permute(parts.x);
  const ValueId y = parts.product(rows);
  const Program forward = parts.with_outputs({y, parts.unpermute(rows)});
  const Backend device = testing::make_shadow_backend(make_cpu_kernels());
  const auto fused_on_device = [&](const Program& program, const GatherUse& use) {
    return names_of(fuse_gathers(program, GatherFusion::kAuto, device, use));
  };
  ASSERT_EQ(fused_on_device(forward, {.differentiated = true}),
            (Names{"permute", "grouped_matmul", "unpermute"}));
  const Backward kept = differentiate(forward, {.outputs = {y}, .inputs = {parts.x}});
  const Backward again = recompute(forward, kept, {rows});
  EXPECT_EQ(names_of(again.program),
            (Names{"grouped_matmul", "permute", "grouped_matmul_wgrad", "unpermute"}));
  EXPECT_EQ(fused_on_device(again.program, {}),
            (Names{"grouped_matmul", "grouped_matmul_wgrad+", "unpermute"}));
}

/// A product may gather where its gradient does not: that makes the rows.
TEST(FuseGathers, RowsThatTheGradientMakes) {
  const Backend device = testing::make_shadow_backend(make_cpu_kernels());
  const auto fused_on_device = [&](const Program& program, const GatherUse& use) {
    return fuse_gathers(program, GatherFusion::kAuto, device, use);
  };
  const auto program_of = [](int64_t size) {
    Parts parts(2, false, 0, size);
    return parts.with_outputs({parts.product(parts.permute(parts.x))});
  };
  const Program forward = fused_on_device(program_of(6200), {.differentiated = true});
  ASSERT_EQ(names_of(forward), Names{"grouped_matmul+"});
  const Backward backward = differentiate(forward, {.outputs = forward.outputs()});
  const Names with_rows = {"permute", "grouped_matmul_wgrad"};
  EXPECT_EQ(names_of(backward.program), with_rows);
  EXPECT_EQ(names_of(fused_on_device(backward.program, {})), with_rows);

  // With more features the rows are kept, unless it is known that they would not be.
  const Program larger = program_of(7500);
  const ValueId rows = larger.find("rows");
  const auto knowing = [&](const std::function<bool(ValueId)>& made_again) {
    return names_of(fused_on_device(larger, {.differentiated = true, .made_again = made_again}));
  };
  EXPECT_EQ(knowing({}), (Names{"permute", "grouped_matmul"}));
  EXPECT_EQ(knowing([&](ValueId id) { return id != rows; }), (Names{"permute", "grouped_matmul"}));
  EXPECT_EQ(knowing([&](ValueId id) { return id == rows; }), Names{"grouped_matmul+"});
}

}  // namespace
}  // namespace tessera
