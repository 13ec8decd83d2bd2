// What the proof finds is wrong by numbers, too.
#include <gtest/gtest.h>

#include <mutex>
#include <numeric>

#include "comm/thread/thread_world.h"
#include "core/testing/case_share.h"
#include "model/proof/mutants_testing.h"

namespace tessera {
namespace {

using testing::Case;
using testing::LayoutCase;
using testing::LooseProgram;
using testing::TestBatch;

/// Whole gradients by name.
using Gradients = std::map<std::string, std::vector<float>>;

constexpr int64_t kRows = 2;
constexpr int64_t kRowLength = 8;

/// A program of layers that is to be run in place of the compiled one.
DerivedProgram derived_of(const LooseProgram& program, const Backend& backend) {
  const Backward& links = program.links[0];
  std::vector<ValueId> saved;
  for (const Link& link : links.saved) saved.push_back(link.forward);
  Executable forward(program.programs[0], backend, saved);
  std::map<ValueId, int64_t> told;
  for (const auto* shared : {&links.saved, &links.bound}) {
    for (const Link& link : *shared) {
      const auto known = forward.rows().balanced().find(link.forward);
      if (known != forward.rows().balanced().end()) told[link.backward] = known->second;
    }
  }
  Executable backward(program.programs[1], backend, {}, told);
  return {.forward = std::move(forward), .derived = links, .backward = std::move(backward)};
}

/// Whether each node makes what its value is declared as: shapes that do not fit are not silent.
bool has_right_shapes(const LooseProgram& loose) {
  for (const Program& program : loose.programs) {
    for (const Node& node : program.nodes()) {
      try {
        const auto types = node.op->infer(program.types(node.inputs));
        for (size_t i = 0; i < types.size(); ++i) {
          const ValueType& declared = program.type(node.outputs[i]);
          if (types[i].shape != declared.shape || types[i].dtype != declared.dtype) return false;
        }
      } catch (const UserError&) {
        return false;
      }
    }
  }
  return true;
}

/// The one layer kind of a stage, changed by the mutant of that number; -1: none. False where
/// there is none of that number, or it does not fit.
bool mutate(StagePrograms& stage, int number) {
  if (number < 0) return true;
  const auto& [key, kind] = *stage.kinds.begin();
  const RankAxes axes(stage.part.groups, stage.config.kv_heads());
  const LooseProgram original(kind->layout, kind->derived);
  std::optional<LooseProgram> chosen;
  int count = 0;
  testing::Mutator(original, stage.part.groups, axes,
                   [&](const std::string&, const LooseProgram& mutant) {
                     if (count++ == number) chosen = mutant;
                   })
      .run();
  if (!chosen || !has_right_shapes(*chosen)) return false;
  const auto changed = std::make_shared<const KindProgram>(
      KindProgram{kind->layout, derived_of(*chosen, stage.backend)});
  for (auto& [layer, program] : stage.of_layers) program = changed.get();
  stage.kinds.begin()->second = changed;
  return true;
}

/// The gradients of one micro-batch that all ranks of the layout share, summed as a step sums them;
/// nullopt where the mutant does not run.
std::optional<Gradients> run_layout(const ModelConfig& config, const LayoutCase& layout,
                                    int mutant) {
  Gradients sums;
  std::mutex mutex;
  bool runs = true;
  const auto run_rank = [&](World& world) {
    const Layout ranks(layout.parallel.layout, layout.num_ranks);
    ModelPart part{.groups = join_stage_groups(world, ranks, layout.parallel)};
    const BatchShape shape = testing::tiny_shape(kRows, kRowLength);
    auto stage =
        std::make_unique<StagePrograms>(config, shape, part, SavedPolicy(), make_cpu_kernels());
    if (!mutate(*stage, mutant)) {
      const std::scoped_lock lock(mutex);
      runs = false;
      return;
    }
    ParameterSet parameters(list_parameters(config, shape.dtype, part.groups, stage->part.chunks),
                            true);
    parameters.initialize(3);
    std::vector<ExpertState> experts = make_expert_states(config);
    TrainingModel model(std::move(stage));
    model.bind(parameters, experts);
    model.begin_step();
    TestBatch batch(config, kRows, kRowLength, 5);
    model.run(batch.view(), testing::test_scales(batch));
    const std::scoped_lock lock(mutex);
    for (const ModelParameter& parameter : parameters.all()) {
      const Slice& slice = parameter.spec.placement.slice;
      std::vector<float> whole(static_cast<size_t>(slice.global.num_elements()));
      copy_slice_into(slice, parameter.grad, view(std::span(whole), slice.global));
      std::vector<float>& sum = sums[parameter.spec.name];
      sum.resize(whole.size());
      for (size_t i = 0; i < whole.size(); ++i) sum[i] += whole[i];
    }
  };
  try {
    run_thread_world(layout.num_ranks, run_rank);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return runs ? std::optional(sums) : std::nullopt;
}

/// The largest error of any gradient, relative to its tensor's largest.
double worst_error(const Gradients& found, const Gradients& expected) {
  double worst = 0;
  for (const auto& [name, values] : expected) {
    double largest = 0;
    double error = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      largest = std::max<double>(largest, std::abs(values[i]));
      const double difference = std::abs(found.at(name)[i] - values[i]);
      error = std::isnan(difference) ? INFINITY : std::max(error, difference);
    }
    if (largest > 0) worst = std::max(worst, error / largest);
  }
  return worst;
}

std::vector<std::string> list_mutants(const ModelConfig& config, const LayoutCase& layout) {
  const auto stage = testing::plan_stage(config, layout);
  const RankAxes axes(stage->part.groups, config.kv_heads());
  const auto& [key, kind] = *stage->kinds.begin();
  std::vector<std::string> names;
  const LooseProgram original(kind->layout, kind->derived);
  testing::Mutator(original, stage->part.groups, axes,
                   [&](const std::string& what, const LooseProgram&) { names.push_back(what); })
      .run();
  return names;
}

/// Whether a mistake changes no number: fractions of counts are the same of twice the counts.
bool is_harmless(const std::string& mutant) {
  return mutant.find("'segment_counts_of_all': of what is summed already") != std::string::npos;
}

/// Layouts of few ranks, all of which share one micro-batch.
std::vector<LayoutCase> small_layouts() {
  std::vector<LayoutCase> small;
  for (const LayoutCase& layout : testing::proof_layouts()) {
    const LayoutSpec& spec = layout.parallel.layout;
    if (layout.num_ranks > 1 && layout.num_ranks <= 4 && spec.tp * spec.cp == layout.num_ranks)
      small.push_back(layout);
  }
  return small;
}

/// Ranks that share a micro-batch have one rank's gradients; with a mistake that runs they do not.
TEST(MutantNumbers, AreNotThoseOfOneRank) {
  int num_run = 0;
  const auto all = testing::gradient_cases();
  const std::vector<std::string> models = {"biases", "all_heads_norm", "shared_gated"};
  for (const std::string& name : testing::share_of_cases(models, 1)) {
    const ModelConfig config = std::ranges::find(all, name, &Case::name)->config;
    const Gradients expected = *run_layout(config, {.name = "one"}, -1);
    for (const LayoutCase& layout : testing::share_of_cases(small_layouts(), 0)) {
      SCOPED_TRACE(name + " on " + layout.name);
      const auto right = run_layout(config, layout, -1);
      ASSERT_TRUE(right.has_value());
      EXPECT_LT(worst_error(*right, expected), 1e-4);
      const std::vector<std::string> mutants = list_mutants(config, layout);
      for (size_t i = 0; i < mutants.size(); ++i) {
        if (mutants[i].starts_with("weight")) continue;  // what is told to those who sum
        const auto found = run_layout(config, layout, static_cast<int>(i));
        if (!found) continue;
        ++num_run;
        if (is_harmless(mutants[i])) continue;
        EXPECT_GT(worst_error(*found, expected), 1e-3) << mutants[i];
      }
    }
  }
  RecordProperty("mutants", num_run);
  EXPECT_GT(num_run, testing::share_of_count(30));
}

}  // namespace
}  // namespace tessera
