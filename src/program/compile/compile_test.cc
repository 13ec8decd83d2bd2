#include "program/compile/compile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/add/add.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/linear/linear.h"
#include "ops/permute/permute.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/route_map/route_map.h"
#include "ops/testing/shadow_backend.h"
#include "program/compile/print.h"
#include "program/dependencies.h"
#include "program/memory_plan.h"

namespace tessera {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// x → norm → linear → + x.
struct Block {
  Program program{"block"};
  ValueId x, out;

  Block() {
    x = program.add_input("x", {DType::kF32, {4, 16}});
    const ValueId norm = program.add_weight("norm.weight", {DType::kF32, {16}});
    const ValueId weight = program.add_weight("weight", {DType::kF32, {16, 16}});
    const ValueId normed = program.add(make_rmsnorm(1e-5), {x, norm}, {"normed", "rstd"})[0];
    const ValueId projected = program.add1(make_linear(), {normed, weight}, "projected");
    out = program.add1(make_add(), {projected, x}, "out");
    program.set_outputs({out});
  }
  DifferentiateRequest gradients() const { return {{out}, {x}}; }
};

/// What `function`, compile or report_passes, makes of a block.
template <typename Function>
auto with_block(const Function& function, Goal goal, CompileOptions options) {
  const Block block;
  if (goal == Goal::kTrain) options.gradients = block.gradients();
  return function(block.program, goal, options, Backend(make_cpu_kernels()));
}

Compiled compile_block(Goal goal, const CompileOptions& options) {
  return with_block(compile, goal, options);
}

CompileReport report_block(Goal goal, const CompileOptions& options) {
  return with_block(report_passes, goal, options);
}

std::vector<std::string> passes_of(const CompileReport& report) {
  std::vector<std::string> names;
  for (const PassEffect& effect : report.effects) names.emplace_back(effect.pass);
  return names;
}

TEST(Compile, PassesComeInOneOrder) {
  std::vector<std::string_view> names;
  for (const Pass& pass : compile_passes()) {
    names.push_back(pass.name);
    EXPECT_FALSE(pass.what.empty()) << pass.name;
    EXPECT_EQ(pass.what.find('\n'), std::string_view::npos) << pass.name;
  }
  EXPECT_THAT(
      names, ElementsAre("fuse_sums", "join_expert_blocks", "fuse_gathers", "differentiate",
                         "round_operands", "keep_quantized", "quantize_saved", "quantize_early",
                         "permute_again", "fuse_gradient_sums", "recompute",
                         "fuse_gradient_gathers", "split_weights", "fuse_producers", "fuse_repeats",
                         "fuse_quantize", "join_products", "schedule", "stash_rows", "set_aside"));
}

TEST(Compile, EachGoalHasItsPasses) {
  EXPECT_THAT(passes_of(report_block(Goal::kInfer, {})),
              ElementsAre("as built", "fuse_sums", "fuse_gathers"));
  EXPECT_THAT(passes_of(report_block(Goal::kInfer, {.fuse_activations = true})),
              ElementsAre("as built", "fuse_sums", "fuse_gathers", "fuse_producers"));
  EXPECT_THAT(
      passes_of(report_block(Goal::kTrain, {})),
      ElementsAre("as built", "fuse_sums", "fuse_gathers", "differentiate", "fuse_gradient_sums",
                  "fuse_gradient_gathers", "fuse_repeats", "schedule"));
  const CompileOptions all = {
      .recompute = {"all"},
      .fuse_activations = true,
      .split_weights = true,
      .rounding = OperandRounding{
          .recipe = &find_recipe("blockwise"), .keeps_rounded = true, .keeps_all_rounded = true}};
  // "as built", and all but the four for devices, and stashing, which does not go with the split.
  EXPECT_EQ(std::ssize(passes_of(report_block(Goal::kTrain, all))),
            1 + std::ssize(compile_passes()) - 5);
}

/// The weight's gradient of the linear: nobody reads it, so it may end with the program.
TEST(Compile, SetsWeightGradientsAside) {
  const Block block;
  const CompileOptions options = {.gradients = block.gradients()};
  const Backend shadow = testing::make_shadow_backend(make_cpu_kernels());
  const Program backward = compile(block.program, Goal::kTrain, options, shadow).backward->program;
  const auto waits = find_waits(backward);
  int num_aside = 0;
  for (int i = 0; i < std::ssize(backward.nodes()); ++i) {
    const Node& node = backward.nodes()[i];
    if (!node.aside) {
      EXPECT_EQ(waits[i], i + 1);
      continue;
    }
    ++num_aside;
    EXPECT_TRUE(node.op->accumulates(0)) << node.op->name();
    EXPECT_EQ(waits[i], std::ssize(backward.nodes()));
    // What it reads is not overwritten before.
    for (const ValueId id : node.inputs)
      EXPECT_EQ(find_lifetimes(backward)[id].last, std::ssize(backward.nodes()) - 1);
  }
  EXPECT_EQ(num_aside, 1);
  const Program on_host = compile_block(Goal::kTrain, {}).backward->program;
  EXPECT_TRUE(std::ranges::none_of(on_host.nodes(), &Node::aside));
}

TEST(Compile, ReportsWhatEachPassLeft) {
  const Compiled compiled = compile_block(Goal::kTrain, {});
  const CompileReport report = report_block(Goal::kTrain, {});
  EXPECT_EQ(report.program, "block");
  EXPECT_EQ(report.goal, Goal::kTrain);
  const auto& effects = report.effects;
  EXPECT_EQ(effects[0].forward.num_nodes, 3);
  EXPECT_EQ(effects[0].backward, ProgramFigures());
  EXPECT_EQ(effects[1].forward.num_nodes, 2);  // the sum is the linear's
  EXPECT_EQ(effects[2].forward.saved_bytes, 0);
  EXPECT_EQ(effects[3].backward.num_nodes, 4);  // of the sum, the linear (two) and the norm
  EXPECT_EQ(effects[3].forward.saved_bytes, 256 + 64);
  EXPECT_EQ(effects[4].backward.num_nodes, 3);
  EXPECT_EQ(effects.back().weights, ProgramFigures());
  EXPECT_EQ(effects.back().forward.num_nodes, std::ssize(compiled.forward.nodes()));
  EXPECT_EQ(effects.back().backward.num_nodes, std::ssize(compiled.backward->program.nodes()));
  EXPECT_THAT(compiled.saved, ::testing::SizeIs(2));
}

TEST(Compile, SplitAndRecomputedProgramsHaveFigures) {
  const CompileOptions options{.recompute = {"normed"}, .split_weights = true};
  const Compiled compiled = compile_block(Goal::kTrain, options);
  ASSERT_TRUE(compiled.weights);
  const PassEffect last = report_block(Goal::kTrain, options).effects.back();
  EXPECT_EQ(last.forward.saved_bytes, 64);  // the reciprocal deviations
  EXPECT_EQ(last.weights.num_nodes, std::ssize(compiled.weights->derived.program.nodes()));
  EXPECT_GT(last.weights.num_nodes, 0);
}

TEST(Compile, ATableSaysWhatPassesDid) {
  CompileReport report{.program = "moe_layer", .goal = Goal::kTrain, .effects = {}};
  report.effects.push_back({"as built", "", {31, 0, 4096}, {}, {}});
  report.effects.push_back({"differentiate", "derives", {31, 2048, 4096}, {52, 0, 8192}, {}});
  EXPECT_EQ("\n" + print_passes(report), R"(
moe_layer (train)                                      forward                        backward
                                 nodes       saved   transient   nodes       saved   transient
  as built                          31         0 B       4 KiB       -           -           -
  differentiate                     31       2 KiB       4 KiB      52         0 B       8 KiB  derives
)");
}

/// Tokens of 4 experts and their product, which reads where each expert's rows begin.
TEST(Compile, NumbersOfRowsStayWhateverIsOffloaded) {
  Program program("experts");
  const ValueId x = program.add_input("x", {DType::kF32, {6, 8}});
  const ValueId idx = program.add_input("idx", {DType::kI32, {6, 2}});
  const ValueId weight = program.add_weight("weight", {DType::kF32, {16, 8}});
  const auto map = program.add(make_route_map({.num_experts = 4, .top_k = 2}), {idx},
                               {"row_of", "source", "offsets"});
  const ValueId rows = program.add1(
      make_permute(), {x, map[RouteMapOutput::kSourceR], map[RouteMapOutput::kRowOfTK]}, "rows");
  const ValueId offsets = map[RouteMapOutput::kOffsets];
  const ValueId out =
      program.add1(make_grouped_matmul({.group_sizes = {4, 4, 4, 4}, .side = GroupedSide::kOut}),
                   {rows, weight, offsets}, "out");
  program.set_outputs({out});
  for (const std::string name : {"all", "offsets"}) {
    CompileOptions options;
    options.gradients = {{out}, {x}};
    options.offload = {name};
    const Compiled compiled = compile(program, Goal::kTrain, options, Backend(make_cpu_kernels()));
    EXPECT_THAT(compiled.saved, Contains(offsets));
    EXPECT_THAT(compiled.offloaded, Not(Contains(offsets)));
    EXPECT_EQ(compiled.offloaded.empty(), name == "offsets");
  }
}

TEST(Compile, RefusesOptionsOfAnotherGoal) {
  const Backend backend(make_cpu_kernels());
  const Block block;
  const auto compile_with = [&](Goal goal, const CompileOptions& options) {
    return [&, goal, options] { compile(block.program, goal, options, backend); };
  };
  for (const CompileOptions& options :
       {CompileOptions{.gradients = block.gradients()}, CompileOptions{.recompute = {"all"}},
        CompileOptions{.split_weights = true}}) {
    EXPECT_THAT(compile_with(Goal::kInfer, options),
                ::testing::ThrowsMessage<InternalError>(HasSubstr("not to infer")));
  }
  EXPECT_THAT(compile_with(Goal::kTrain, {}),
              ::testing::ThrowsMessage<InternalError>(HasSubstr("without a gradient")));
}

}  // namespace
}  // namespace tessera
