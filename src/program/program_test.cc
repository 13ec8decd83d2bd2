#include "program/program.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ops/add/add.h"
#include "ops/linear/linear.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/route_map/route_map.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"
#include "program/compile/print.h"
#include "program/compile/recompute.h"

namespace tessera {
namespace {

/// x → norm → linear → + x: each value read more than once, so that gradients are added.
struct Block {
  Program program{"block"};
  ValueId x, norm_weight, weight, normed, projected, out;

  Block() {
    x = program.add_input("x", {DType::kF32, {5, 8}});
    norm_weight = program.add_weight("norm.weight", {DType::kF32, {8}});
    weight = program.add_weight("weight", {DType::kF32, {8, 8}});
    normed = program.add(make_rmsnorm(1e-5), {x, norm_weight}, {"normed", "rstd"})[0];
    projected = program.add1(make_linear(), {normed, weight}, "projected");
    const ValueId sum = program.add1(make_add(), {projected, normed}, "sum");
    out = program.add1(make_add(), {sum, x}, "out");
    program.set_outputs({out});
  }
  DifferentiateRequest request() const { return {{out}, {x}}; }
};

void fill(const Tensor& tensor, uint64_t seed) {
  Random random(seed, 0);
  for (float& value : tensor.span<float>()) value = static_cast<float>(random.next_normal());
}

testing::ProgramRun make_run(const Block& block, const Program& forward) {
  testing::ProgramRun run(forward, block.request(), make_cpu_kernels());
  fill(run.value(block.x), 1);
  fill(run.value(block.norm_weight), 2);
  fill(run.value(block.weight), 3);
  fill(run.grad(block.out), 4);
  return run;
}

double weighted_output(const Block& block, const testing::ProgramRun& run) {
  run.run_forward();
  double total = 0;
  const auto out = run.value(block.out).span<float>();
  const auto grad = run.grad(block.out).span<float>();
  for (size_t i = 0; i < out.size(); ++i) total += static_cast<double>(out[i]) * grad[i];
  return total;
}

TEST(Differentiate, MatchesFiniteDifferencesOfTheWholeProgram) {
  const Block block;
  const testing::ProgramRun run = make_run(block, block.program);
  run.run_forward();
  run.run_backward();
  for (const ValueId id : {block.x, block.norm_weight, block.weight}) {
    const auto grad = run.grad(id).span<float>();
    const auto value = run.value(id).span<float>();
    for (size_t i = 0; i < value.size(); ++i) {
      const float kept = value[i];
      value[i] = kept + 1e-2F;
      const double above = weighted_output(block, run);
      value[i] = kept - 1e-2F;
      const double below = weighted_output(block, run);
      value[i] = kept;
      EXPECT_NEAR(grad[i], (above - below) / 2e-2, 5e-3)
          << block.program.value(id).name << "[" << i << "]";
    }
  }
}

TEST(Differentiate, AccumulatorsAdd) {
  const Block block;
  const testing::ProgramRun run = make_run(block, block.program);
  run.run_forward();
  run.run_backward();
  const auto grad = run.grad(block.weight).span<float>();
  const std::vector<float> once(grad.begin(), grad.end());
  run.run_backward();
  for (size_t i = 0; i < once.size(); ++i)
    EXPECT_NEAR(grad[i], 2 * once[i], 1e-4 * (1 + std::abs(once[i])));
}

TEST(Differentiate, SavesOnlyWhatBackwardReads) {
  const Block block;
  const Backward backward = differentiate(block.program, block.request());
  std::vector<std::string> saved;
  for (const Link& link : backward.saved) saved.push_back(block.program.value(link.forward).name);
  std::ranges::sort(saved);
  EXPECT_EQ(saved, (std::vector<std::string>{"normed", "rstd"}));
}

TEST(Differentiate, RefusesAnInputThatNoGradientReaches) {
  Program program("p");
  const ValueId x = program.add_input("x", {DType::kF32, {2, 2}});
  const ValueId y = program.add_input("y", {DType::kF32, {2, 2}});
  const ValueId out = program.add1(make_add(), {x, x}, "out");
  EXPECT_THROW(differentiate(program, {{out}, {y}}), InternalError);
}

TEST(Recompute, DropsAValueAndKeepsTheNumbers) {
  const Block block;
  const Backward kept = differentiate(block.program, block.request());
  const Backward again = recompute(block.program, kept, {block.normed});
  EXPECT_LT(again.saved_bytes(), kept.saved_bytes());
  EXPECT_EQ(again.program.nodes().size(), kept.program.nodes().size() + 1);
  EXPECT_EQ(again.accumulators.size(), kept.accumulators.size());
  EXPECT_EQ(again.grad_inputs.size(), kept.grad_inputs.size());
}

TEST(Recompute, RefusesToRouteTwice) {
  Program program("p");
  const ValueId expert_idx = program.add_input("expert_idx", {DType::kI32, {4, 1}});
  const ValueId probs = program.add_input("probs", {DType::kF32, {4, 1}});
  const auto map =
      program.add(make_route_map({.num_experts = 2, .top_k = 1}), {expert_idx, probs}, {"row_of"});
  Backward backward{Program("b"), {}, {}, {}, {}, {}};
  const ValueId reader = backward.program.add_input("row_of", program.type(map[0]));
  backward.saved.push_back({map[0], reader});
  backward.program.set_outputs({reader});
  EXPECT_THROW(recompute(program, backward, {map[0]}), UserError);
}

TEST(Program, RefusesShapesThatDoNotFit) {
  Program program("p");
  const ValueId a = program.add_input("a", {DType::kF32, {2, 3}});
  const ValueId b = program.add_input("b", {DType::kF32, {3, 2}});
  EXPECT_THROW(program.add1(make_add(), {a, b}, "c"), UserError);
}

TEST(Print, ShowsValuesOperatorsCostsAndWhatIsSaved) {
  const Block block;
  const std::string text = print_program(block.program, {block.normed});
  for (const char* part : {"program block", "weight %2:weight f32 [8, 8]", "normed f32 [5, 8] *",
                           "linear(", "rmsnorm[", "MFLOP", "live", "return %7:out"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

/// A random chain of additions, in which any earlier value may be read again.
Program random_program(Random& random, int64_t num_nodes) {
  Program program("random");
  std::vector<ValueId> values = {program.add_input("a", {DType::kF32, {16, 16}})};
  for (int64_t i = 0; i < num_nodes; ++i) {
    const auto pick = [&] { return values[random.next_below(values.size())]; };
    const ValueId left = pick();
    values.push_back(
        program.add1(make_add(), {left, random.next_below(2) == 0 ? left : pick()}, "v"));
  }
  program.set_outputs({values.back()});
  return program;
}

TEST(MemoryPlan, ValuesThatLiveTogetherDoNotOverlap) {
  Random random(9, 0);
  for (int round = 0; round < 50; ++round) {
    const Program program = random_program(random, 1 + static_cast<int64_t>(random.next_below(30)));
    const MemoryPlan plan = plan_memory(program, {});
    const auto lifetimes = find_lifetimes(program);
    for (ValueId a = 0; a < program.num_values(); ++a) {
      for (ValueId b = 0; b < a; ++b) {
        const Placement& pa = plan.values[a];
        const Placement& pb = plan.values[b];
        if (pa.storage != Storage::kTransient || pb.storage != Storage::kTransient) continue;
        const Lifetime& la = lifetimes[a];
        const Lifetime& lb = lifetimes[b];
        const bool together = la.first <= lb.last && lb.first <= la.last;
        const int64_t bytes = program.type(a).num_bytes();
        const bool apart = pa.offset + bytes <= pb.offset || pb.offset + bytes <= pa.offset;
        EXPECT_TRUE(!together || apart)
            << "round " << round << ": values " << a.index() << " and " << b.index();
      }
    }
    EXPECT_LE(plan.transient_bytes, static_cast<int64_t>(program.values().size()) * 1024);
  }
}

TEST(MemoryPlan, AChainNeedsTwoValuesAtATime) {
  Program program("chain");
  ValueId value = program.add_input("a", {DType::kF32, {16, 16}});
  for (int i = 0; i < 10; ++i) value = program.add1(make_add(), {value, value}, "v");
  program.set_outputs({value});
  EXPECT_EQ(plan_memory(program, {}).transient_bytes, 2 * 1024);
}

TEST(Executable, NamesTheValueThatIsNotBound) {
  const Block block;
  const Executable program(block.program, make_cpu_kernels());
  try {
    program.run(program.make_bindings());
    FAIL() << "expected InternalError";
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what()).find("'x'"), std::string::npos) << error.what();
  }
}

TEST(Executable, RefusesAnOperatorWithoutKernel) {
  const Block block;
  EXPECT_THROW(Executable(block.program, KernelTable{}), InternalError);
}

}  // namespace
}  // namespace tessera
