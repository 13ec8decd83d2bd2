#include "step/build/step_runs.h"

#include <algorithm>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include "step/build/merge_runs.h"

namespace tessera {
namespace {

PassDirection direction_of(PipelinePass pass) {
  return pass == PipelinePass::kForward    ? PassDirection::kForward
         : pass == PipelinePass::kBackward ? PassDirection::kBackward
                                           : PassDirection::kWeights;
}

/// The places of one chunk: the micro-batches that have them, -1 for free ones.
class Places {
 public:
  explicit Places(int64_t count) : micro_batches_(count, -1) {}

  int64_t find(int64_t micro_batch) const {
    const auto found = std::ranges::find(micro_batches_, micro_batch);
    ensure(found != micro_batches_.end(), "micro-batch {} has none of the {} places of its chunk",
           micro_batch, micro_batches_.size());
    return found - micro_batches_.begin();
  }
  int64_t take(int64_t micro_batch) {
    const int64_t place = find(-1);
    micro_batches_[place] = micro_batch;
    return place;
  }
  void give_back(int64_t place) { micro_batches_[place] = -1; }

 private:
  std::vector<int64_t> micro_batches_;
};

class RunLister {
 public:
  RunLister(const StagePrograms& programs, const ParameterSet* parameters)
      : programs_(programs), parameters_(parameters) {}

  void add(StepPass pass, const std::vector<ProgramRef>& refs) { add(pass, list_runs(pass, refs)); }

  /// Two passes that are merged.
  void add_merged(const StepPass& forward, const std::vector<ProgramRef>& forward_refs,
                  const StepPass& backward, const std::vector<ProgramRef>& backward_refs) {
    const std::vector<StepRun> forward_runs = list_runs(forward, forward_refs);
    const std::vector<StepRun> backward_runs = list_runs(backward, backward_refs);
    std::vector<StepRun> runs;
    for (const MergedPart& part : order_of(forward, forward_runs, backward, backward_runs)) {
      runs.push_back((part.is_forward ? forward_runs : backward_runs)[part.run]);
      runs.back().part = part.part;
    }
    add(forward, runs);
    add(backward, std::vector<StepRun>());
  }
  StepPasses take() && { return std::move(result_); }

 private:
  void add(StepPass pass, const std::vector<StepRun>& runs) {
    pass.first_run = result_.runs.size();
    result_.runs.insert(result_.runs.end(), runs.begin(), runs.end());
    pass.last_run = result_.runs.size();
    result_.passes.push_back(pass);
  }

  std::vector<StepRun> list_runs(const StepPass& pass, const std::vector<ProgramRef>& refs) {
    const PipelineChunk& chunk = programs_.part.chunks[pass.step.chunk];
    std::vector<StepRun> runs;
    for (const ProgramRef& ref : refs) {
      runs.push_back({.ref = ref,
                      .executable = &find_executable(programs_, chunk, ref),
                      .parameters = parameters_of(pass.step.chunk, chunk, ref),
                      .chunk = pass.step.chunk,
                      .place = pass.place,
                      .micro_batch = pass.step.micro_batch});
    }
    return runs;
  }

  /// The same for all micro-batches.
  const std::vector<MergedPart>& order_of(const StepPass& forward,
                                          const std::vector<StepRun>& forward_runs,
                                          const StepPass& backward,
                                          const std::vector<StepRun>& backward_runs) {
    const auto [known, is_new] = orders_.try_emplace({forward.step.chunk, backward.step.chunk});
    if (is_new) {
      const bool same_shapes = programs_.config.moe.inner_sizes.empty();
      known->second = merge_runs(forward_runs, backward_runs, same_shapes);
    }
    return known->second;
  }

  /// Likewise.
  const ProgramParameters& parameters_of(int64_t idx, const PipelineChunk& chunk,
                                         const ProgramRef& ref) {
    const auto key = std::tuple(idx, ref.part, ref.direction, ref.idx);
    const auto known = known_.find(key);
    if (known != known_.end()) return known->second;
    if (parameters_ == nullptr) return known_[key];
    return known_.emplace(key, find_parameters(programs_, chunk, ref, *parameters_)).first->second;
  }

  const StagePrograms& programs_;
  const ParameterSet* parameters_;  // may be null
  std::map<std::tuple<int64_t, ProgramPart, PassDirection, int64_t>, ProgramParameters> known_;
  std::map<std::pair<int64_t, int64_t>, std::vector<MergedPart>> orders_;  // by chunks
  StepPasses result_;
};

/// Adds backward passes of one chunk that follow one another, [first, last), layer by layer.
void add_in_turn(RunLister& lister, const StagePrograms& programs,
                 std::span<const PipelineStep> steps, Places& places) {
  const PipelineChunk& chunk = programs.part.chunks[steps.front().chunk];
  const auto refs = list_pass(programs, chunk, PassDirection::kBackward);
  for (size_t i = 0; i < refs.size(); ++i) {
    const bool ends = i + 1 == refs.size();
    for (const PipelineStep& step : steps) {
      const int64_t place = places.find(step.micro_batch);
      lister.add({.step = step, .place = place, .ends = ends}, {refs[i]});
      if (ends) places.give_back(place);
    }
  }
}

/// How many backward passes of one chunk begin here.
size_t count_backward(const std::vector<PipelineStep>& steps, size_t first) {
  size_t last = first;
  while (last < steps.size() && steps[last].pass == PipelinePass::kBackward &&
         steps[last].chunk == steps[first].chunk)
    ++last;
  return last - first;
}

}  // namespace

StepPasses list_step_passes(const StagePrograms& programs, const ParameterSet* parameters,
                            const std::vector<PipelineStep>& steps) {
  ensure(!programs.part.layers_in_turn || !programs.part.split_weights,
         "layers take turns in passes whose weight gradients are apart");
  RunLister lister(programs, parameters);
  std::vector<Places> places;
  for (const int64_t count : programs.part.in_flight) places.emplace_back(count);
  const std::vector<bool> last = find_last_passes(steps);
  // Takes the place of a pass that begins.
  const auto make_pass = [&](size_t i) {
    const PipelineStep& step = steps[i];
    Places& of_chunk = places.at(step.chunk);
    const bool begins = step.pass == PipelinePass::kForward;
    const int64_t place =
        begins ? of_chunk.take(step.micro_batch) : of_chunk.find(step.micro_batch);
    return StepPass{.step = step, .place = place, .begins = begins, .ends = last[i]};
  };
  const auto list_refs = [&](const PipelineStep& step) {
    return list_pass(programs, programs.part.chunks[step.chunk], direction_of(step.pass));
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    const PipelineStep& step = steps[i];
    if (step.merged) {
      const StepPass forward = make_pass(i);
      const StepPass backward = make_pass(++i);
      lister.add_merged(forward, list_refs(step), backward, list_refs(steps[i]));
      if (backward.ends) places.at(steps[i].chunk).give_back(backward.place);
      continue;
    }
    if (programs.part.layers_in_turn && step.pass == PipelinePass::kBackward) {
      const size_t count = count_backward(steps, i);
      add_in_turn(lister, programs, std::span(steps).subspan(i, count), places.at(step.chunk));
      i += count - 1;
      continue;
    }
    const StepPass pass = make_pass(i);
    std::vector<ProgramRef> refs = list_refs(step);
    if (pass.ends && step.pass == PipelinePass::kBackward) {
      // A schedule may split weight gradients off in the programs alone.
      const auto weights =
          list_pass(programs, programs.part.chunks[step.chunk], PassDirection::kWeights);
      refs.insert(refs.end(), weights.begin(), weights.end());
    }
    lister.add(pass, refs);
    if (pass.ends) places.at(step.chunk).give_back(pass.place);
  }
  return std::move(lister).take();
}

StepPasses list_evaluation_passes(const StagePrograms& programs, const ParameterSet& parameters) {
  RunLister lister(programs, &parameters);
  for (size_t c = 0; c < programs.part.chunks.size(); ++c) {
    lister.add({.step = {.chunk = static_cast<int64_t>(c)}, .begins = true, .ends = true},
               list_evaluation(programs.part.chunks[c]));
  }
  return std::move(lister).take();
}

}  // namespace tessera
