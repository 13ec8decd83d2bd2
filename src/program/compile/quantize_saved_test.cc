#include "program/compile/quantize_saved.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/communicator.h"
#include "ops/collective/collective.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/permute/permute.h"
#include "ops/quantize/quantize.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "program/compile/keep_quantized.h"
#include "program/compile/recompute.h"
#include "program/rounding/round_operands.h"
#include "program/testing/program_testing.h"

namespace tessera {
namespace {

constexpr int64_t kTokens = 6;
constexpr int64_t kRows = 12;
constexpr int64_t kWidth = 40;
constexpr int64_t kSize = 16;
const std::vector<int64_t> kSizes = {kSize, kSize};
const std::map<std::string, std::vector<int64_t>> kMaps = {
    {"source", {5, 0, 3, -1, 9, 11, 2, 8, 1, 4, 7, -1}},
    {"row_of", {1, 8, 6, 2, 9, 0, -1, 10, 7, 4, -1, 5}},
    {"offsets", {0, 7, kRows}}};

struct ExpertsOptions {
  bool gathers = false;    ///< tokens come of an exchange
  bool reads_pre = false;  ///< somebody else does
  std::vector<std::string> plain = {};
};

/// x → [all_gather] → permute → FC1 → activation → FC2 → out, rounded and differentiated.
struct Experts {
  Program program{"experts"};
  Backward backward;

  explicit Experts(const ExpertsOptions& options) {
    const ValueId x = program.add_input("x", {DType::kBF16, {kTokens, kWidth}});
    const ValueId source = program.add_input("source", {DType::kI32, {kRows}});
    const ValueId row_of = program.add_input("row_of", {DType::kI32, {kTokens, 2}});
    const ValueId offsets = program.add_input("offsets", {DType::kI64, {3}});
    const ValueId up = program.add_weight("experts.up", {DType::kBF16, {4 * kSize, kWidth}});
    const ValueId down = program.add_weight("experts.down", {DType::kBF16, {2 * kSize, kWidth}});
    ValueId tokens = x;
    if (options.gathers)
      tokens = program.add1(make_all_gather(make_single_communicator("ep")), {x}, "arrived");
    const ValueId rows = program.add1(make_permute(), {tokens, source, row_of}, "rows");
    const ValueId pre = program.add1(
        make_grouped_matmul({.group_sizes = {2 * kSize, 2 * kSize}, .side = GroupedSide::kOut}),
        {rows, up, offsets}, "pre");
    const ValueId act =
        program.add1(make_expert_activation({.expert_sizes = kSizes}), {pre, offsets}, "act");
    std::vector<ValueId> outputs = {
        program.add1(make_grouped_matmul({.group_sizes = kSizes, .side = GroupedSide::kIn}),
                     {act, down, offsets}, "out")};
    if (options.reads_pre) {
      const ValueId norm = program.add_weight("norm", {DType::kF32, {2 * kSize}});
      outputs.push_back(program.add(make_rmsnorm(1e-5), {pre, norm}, {"normed", "rstd"})[0]);
    }
    program.set_outputs(outputs);
    backward = differentiate(program, {outputs, {x}});
    const OperandRounding rounding{.recipe = &find_recipe("rowwise"),
                                   .plain = options.plain,
                                   .keeps_rounded = true,
                                   .keeps_all_rounded = true};
    const Program plain = program;
    program = round_operands(plain, rounding);
    backward = keep_quantized(program, round_operands(plain, backward, rounding));
  }
};

std::vector<std::string> list_saved(const Experts& experts) {
  std::vector<std::string> lines;
  for (const Link& link : experts.backward.saved) {
    const Value& value = experts.program.value(link.forward);
    lines.push_back(value.name + " " + Format(value.type.dtype, value.type.scale).name());
    EXPECT_EQ(experts.backward.program.type(link.backward), value.type) << value.name;
  }
  std::ranges::sort(lines);
  return lines;
}

using ::testing::Contains;
using ::testing::ElementsAre;

TEST(QuantizeSaved, KeepsWhatTheActivationsGradientReads) {
  Experts experts({});
  EXPECT_THAT(list_saved(experts), ElementsAre("act e4m3 row", "pre bf16", "rows e4m3 row"));
  const Program before = experts.program;
  const int64_t bytes = experts.backward.saved_bytes();
  quantize_saved(experts.program, experts.backward);
  EXPECT_THAT(list_saved(experts), ElementsAre("act e4m3 row", "pre e4m3 row", "rows e4m3 row"));
  EXPECT_LT(experts.backward.saved_bytes(), bytes);
  // The last reader of the values is the Quantize, directly behind the activation.
  const std::vector<Node>& nodes = experts.program.nodes();
  const auto activation = std::ranges::find_if(
      nodes, [](const Node& node) { return node.op->name() == ExpertActivation::kName; });
  ASSERT_LT(activation, nodes.end() - 1);
  const Node& quantize = activation[1];
  EXPECT_EQ(quantize.op->name(), Quantize::kName);
  EXPECT_EQ(quantize.op->attributes(), "e4m3 row");
  EXPECT_EQ(quantize.inputs[0], activation->inputs[ExpertActivation::kPre]);
  EXPECT_THAT(experts.backward.program.nodes(),
              Contains(::testing::ResultOf([](const Node& node) { return node.op->attributes(); },
                                           ::testing::HasSubstr("scaled_pre"))));
  // What the forward program gives stays as it is.
  const ValueId out = before.outputs()[0];
  EXPECT_EQ(testing::run_on_noise(experts.program, make_cpu_kernels(), {}, kMaps).at(out),
            testing::run_on_noise(before, make_cpu_kernels(), {}, kMaps).at(out));
}

/// Of products that are left as they are, and values that others read.
TEST(QuantizeSaved, LeavesTheRest) {
  for (const ExpertsOptions& options :
       {ExpertsOptions{.plain = {"experts.down"}}, ExpertsOptions{.reads_pre = true}}) {
    Experts experts(options);
    const std::vector<std::string> before = list_saved(experts);
    EXPECT_THAT(before, Contains("pre bf16"));
    quantize_saved(experts.program, experts.backward);
    EXPECT_EQ(list_saved(experts), before);
  }
}

/// What is recomputed is rounded as it would have been kept.
TEST(QuantizeSaved, IsRecomputed) {
  Experts experts({});
  quantize_saved(experts.program, experts.backward);
  std::vector<ValueId> all;
  for (const Link& link : experts.backward.saved) all.push_back(link.forward);
  const Backward again = recompute(experts.program, experts.backward, all);
  EXPECT_TRUE(again.saved.empty());
  EXPECT_EQ(again.grad_inputs.size(), 1U);
}

TEST(PermuteAgain, KeepsTokensInsteadOfRows) {
  Experts experts({});
  experts.backward = permute_again(experts.program, experts.backward);
  EXPECT_THAT(list_saved(experts), ElementsAre("act e4m3 row", "pre bf16"));
}

TEST(PermuteAgain, RepeatsNoExchange) {
  Experts experts({.gathers = true});
  const auto count = [&] {
    return std::ranges::count_if(experts.backward.program.nodes(),
                                 [](const Node& node) { return node.op->communicates(); });
  };
  const auto exchanges = count();
  experts.backward = permute_again(experts.program, experts.backward);
  EXPECT_EQ(count(), exchanges);
}

}  // namespace
}  // namespace tessera
