#include "program/fuse_gathers.h"

#include <gtest/gtest.h>

#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/permute/permute.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/route_map/route_map.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"
#include "ops/testing/shadow_backend.h"
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
  ValueId x, idx, weight, offsets, source, row_of;

  explicit Parts(int64_t top_k = 2, bool ragged = false, double capacity_factor = 0) {
    ValueType type{DType::kF32, {kTokens, kWidth}};
    if (ragged) {
      type.ragged_dim = 0;
      type.extent = program.add_input("tokens", {DType::kI64, {1}});
    }
    x = program.add_input("x", type);
    ValueType per_token = with_last_dim(with_dtype(type, DType::kI32), top_k);
    if (top_k == 1) per_token.shape = {kTokens};
    idx = program.add_input("idx", per_token);
    weight = program.add_weight("weight", {DType::kF32, {kExperts * kSize, kWidth}});
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
    return program.add1(make_grouped_matmul({std::vector<int64_t>(kExperts, kSize), side}),
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
  return names_of(fuse_gathers(program, which, Backend(make_cpu_kernels())));
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

TEST(FuseGathers, AutoAsksTheReadersAndNeverTheHosts) {
  Parts parts;
  const Program program = parts.with_outputs({parts.product(parts.permute(parts.x))});
  const Names plain = {"permute", "grouped_matmul"};
  EXPECT_EQ(fused(program, GatherFusion::kNever), plain);
  EXPECT_EQ(fused(program, GatherFusion::kAuto), plain);
  const Backend device = testing::make_shadow_backend(make_cpu_kernels());
  const auto& product = dynamic_cast<const TakesGather&>(*program.nodes().back().op);
  const bool pays = product.gather_pays(program.types(program.nodes().back().inputs));
  EXPECT_EQ(names_of(fuse_gathers(program, GatherFusion::kAuto, device)),
            pays ? Names{"grouped_matmul+"} : plain);
  EXPECT_EQ(names_of(fuse_gathers(program, GatherFusion::kNever, device)), plain);
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
  const Program forward = fuse_gathers(plain, GatherFusion::kAlways, backend);
  const Backward backward = differentiate(forward, request);
  EXPECT_EQ(names_of(fuse_gathers(backward.program, GatherFusion::kAlways, backend)),
            (Names{"grouped_matmul+", "grouped_matmul_wgrad+", "grouped_matmul", "unpermute",
                   "grouped_matmul_wgrad+"}));
  // x is an input, which is there anyway.
  EXPECT_EQ(kept.saved_bytes() - backward.saved_bytes(),
            parts.program.type(parts.program.find("rows")).num_bytes());
}

}  // namespace
}  // namespace tessera
