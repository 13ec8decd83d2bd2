#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "comm/planned_world.h"
#include "comm/thread/thread_world.h"
#include "model/layers/block_program.h"
#include "model/run/model_testing.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/testing/program_run.h"
#include "parallel/options.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// One expert with `factor` times the mean, the rest as Zipf has them: the expert of each token.
std::vector<int64_t> skewed_choices(int64_t num_experts, int64_t num_tokens, int64_t factor) {
  std::vector<double> shares(num_experts, 0.0);
  double rest = 0;
  for (int64_t e = 1; e < num_experts; ++e) rest += shares[e] = 1.0 / static_cast<double>(e);
  const double hot = static_cast<double>(factor) / static_cast<double>(num_experts);
  std::vector<int64_t> choices;
  double until = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    until += (e == 0 ? hot : shares[e] / rest * (1 - hot)) * static_cast<double>(num_tokens);
    while (static_cast<double>(std::ssize(choices)) + 0.5 < until) choices.push_back(e);
  }
  choices.resize(num_tokens, num_experts - 1);
  return choices;
}

/// The rows that the experts of a rank compute, clones among them, where each of its tokens is one
/// that the router sends to the expert chosen for it.
int64_t count_rows(World& world, const ParallelSpec& parallel,
                   const std::vector<int64_t>& choices) {
  const int64_t ep = world.size();
  const int64_t each = std::ssize(choices) / ep;
  ModelConfig config = testing::tiny_config();
  config.moe.num_experts = 4 * ep;
  config.moe.top_k = 1;
  config.hidden_size = config.moe.num_experts;
  const Layout layout(parallel.layout, ep);
  const StageGroups groups = join_stage_groups(world, layout, parallel);
  ModelProgram block =
      build_block(config, LayerBlock::kMoe, {.moe = true}, testing::tiny_shape(1, each), groups);
  Program& program = block.forward;
  std::vector<ValueId> ends;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    if (program.value(id).name == "expert_offsets") ends.push_back(id);
  }
  std::vector<ValueId> outputs = program.outputs();
  outputs.insert(outputs.end(), ends.begin(), ends.end());
  program.set_outputs(outputs);
  const testing::ProgramRun run(program, {}, make_cpu_kernels());
  for (int64_t t = 0; t < each; ++t)
    run.value(block.at(Port::kHidden))
        .as<float>()[t * config.hidden_size + choices[t * ep + world.rank()]] = 1;
  float* router = run.value(program.find("moe.router.weight")).as<float>();
  for (int64_t e = 0; e < config.moe.num_experts; ++e) router[e * config.hidden_size + e] = 10;
  run.run_forward();
  int64_t rows = 0;
  for (const ValueId id : ends) rows += run.value(id).span<int64_t>().back();
  return rows;
}

/// The most rows of a rank over the mean.
double slowest_rank(int64_t ep, int64_t slots) {
  constexpr int64_t kTokensEach = 160;
  const std::vector<int64_t> choices = skewed_choices(4 * ep, ep * kTokensEach, 8);
  ParallelSpec parallel;
  parallel.layout.ep = ep;
  parallel.clone_experts = slots;
  std::vector<int64_t> rows(ep);
  run_thread_world(
      ep, [&](World& world) { rows[world.rank()] = count_rows(world, parallel, choices); });
  EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), int64_t{0}), ep * kTokensEach);
  return static_cast<double>(*std::ranges::max_element(rows)) / kTokensEach;
}

/// One expert with 8 times the mean, the others as Zipf has them.
TEST(ExpertClones, BringTheSlowestRankWithin115PercentOfTheMean) {
  for (const int64_t ep : {4, 8}) {
    EXPECT_GT(slowest_rank(ep, 0), 2.0) << ep;
    EXPECT_LE(slowest_rank(ep, 2), 1.15) << ep;
  }
}

struct Refusal {
  std::function<void(ModelConfig&, ParallelSpec&)> change;
  std::string found;
  std::string advice;
};

/// Each with what was found and what to set.
TEST(ExpertClones, RefuseWhatTheyDoNotGoWith) {
  using M = ModelConfig;
  using P = ParallelSpec;
  const std::vector<Refusal> refusals = {
      {[](M&, P& p) { p.layout.etp = 2; }, "parallel.etp 2", "parallel.etp = 1"},
      {[](M&, P& p) { p.exchange = ExchangeSizes::kBounded; }, "parallel.exchange", "\"exact\""},
      {[](M&, P& p) { p.dispatcher = DispatcherRequest::kAllGather; }, "\"all_gather\"",
       "\"all_to_all\""},
      {[](M& m, P&) { m.moe.experts = ExpertPath::kBlockSparse; }, "block_sparse", "grouped"},
      {[](M& m, P&) {
         m.moe.inner_sizes = {8, 8, 8, 4};
       },
       "inner_sizes", "moe.inner_size"},
      {[](M& m, P&) { m.moe.capacity_factor = 1.5; }, "moe.capacity_factor 1.5",
       "moe.capacity_factor = 0"},
  };
  for (const Refusal& refusal : refusals) {
    ModelConfig config = testing::tiny_config();
    ParallelSpec parallel;
    parallel.layout.ep = 2;
    parallel.clone_experts = 1;
    refusal.change(config, parallel);
    const auto world = make_planned_world(0, 4);
    const Layout layout(parallel.layout, 4);
    const StageGroups groups = join_stage_groups(*world, layout, parallel);
    EXPECT_THAT(
        [&] {
          build_block(config, LayerBlock::kMoe, {.moe = true}, testing::tiny_shape(1, 8), groups);
        },
        ::testing::ThrowsMessage<UserError>(
            AllOf(HasSubstr("parallel.clone_experts 1 with"), HasSubstr(refusal.found),
                  HasSubstr(refusal.advice), HasSubstr("parallel.clone_experts = 0"))));
  }
}

}  // namespace
}  // namespace tessera
