#include "train/plan/search.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <set>
#include <thread>

#include "train/memory/search_policy.h"
#include "train/plan/balance_stages.h"
#include "train/setup/device_choice.h"
#include "train/setup/step_schedule.h"

namespace tessera {
namespace {

/// Layouts whose variants are judged, and configurations that are simulated as a whole.
constexpr size_t kLayoutsToVary = 24;
constexpr size_t kLayoutsToRefine = 18;
/// Of the busiest stage's time, which other cuts of the layers must save to be judged.
constexpr double kWorthCutting = 0.02;

/// Stages that are cut by time, and what a step is then thought to take.
struct OtherStages {
  std::string layout;  ///< parallel.pipeline_layout
  double seconds = 0;
};

/// A configuration that was judged by some of its stages.
struct Judged {
  Settings settings;
  double seconds = 0;
  int64_t bytes = 0;  ///< of the fullest stage
  bool fits = false;
  std::optional<OtherStages> stages = std::nullopt;  ///< where they are worth to be judged
};

/// Thrown on other threads where a pause has ended the search.
struct SearchEnded {};

/// Runs `work` for 0 to count - 1 on all processors; what it is given it calls now and then, for
/// `pause` on the caller's thread. What is thrown ends the program's search with the exception of
/// the pause, or of the first number that has one; of those behind it none is begun.
void run_beside(size_t count, const std::function<void(size_t, const PlanPause& look)>& work,
                const PlanPause& pause) {
  std::vector<std::exception_ptr> failures(count);
  std::atomic<size_t> first_failure = count;
  std::exception_ptr end;
  std::atomic<bool> ended = false;
  const std::thread::id caller = std::this_thread::get_id();
  const PlanPause look = [&] {
    if (ended) throw SearchEnded();
    if (!pause || std::this_thread::get_id() != caller) return;
    try {
      pause();
    } catch (...) {
      end = std::current_exception();
      ended = true;
      throw;
    }
  };
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < count; ++i) {
    if (i > first_failure || ended) continue;
    try {
      look();
      work(i, look);
    } catch (...) {
      failures[i] = std::current_exception();
      for (size_t first = first_failure; i < first;) first_failure.compare_exchange_weak(first, i);
    }
  }
  if (end) std::rethrow_exception(end);
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

int64_t device_bytes(const SimulatedStep& step) {
  return step.fullest().memory.total();
}

/// What all ranks of a node want of its host's memory must be there.
bool fits_host(const SimulatedStep& step, const Hardware& hardware) {
  if (hardware.on_host) return true;
  const int64_t ranks = std::min(hardware.node_devices, step.num_ranks);
  int64_t most = 0;
  for (const SimulatedStage& stage : step.stages)
    most = std::max(most, stage.memory.activations.offloaded + stage.memory.state.on_host);
  return most * ranks <= hardware.host_memory_bytes();
}

class Search {
 public:
  Search(const SearchSpace& space, const StepWork& work, const PlanProgress& progress,
         const PlanPause& pause)
      : space_(space),
        work_(work),
        progress_(progress),
        pause_(pause),
        flops_(flops_of(space.base)),
        limit_(memory_of(space.base, work.hardware())) {}

  PlanResult run() {
    const std::vector<Settings> layouts = list_layouts(space_);
    std::vector<Judged> judged = judge(layouts, 0, 0.4);
    sort(judged);
    std::vector<Settings> variants;
    for (size_t i = 0; i < std::min(kLayoutsToVary, judged.size()); ++i) {
      for (Settings& one : list_variants(space_, judged[i].settings))
        variants.push_back(std::move(one));
    }
    for (Judged& one : judge(variants, 0.4, 0.55)) judged.push_back(std::move(one));
    for (Judged& one : judge(cut_by_time(judged), 0.55, 0.6)) judged.push_back(std::move(one));
    sort(judged);
    for (Judged& one : judge(merge(judged), 0.6, 0.65)) judged.push_back(std::move(one));
    sort(judged);
    for (Judged& one : judge(dispatch_otherwise(judged), 0.65, 0.7))
      judged.push_back(std::move(one));
    require(!judged.empty(),
            "no layout of {} ranks can train this with a global batch of {}{}; change --gpus or "
            "train.global_batch, or set fewer keys of [parallel]",
            space_.num_ranks, space_.base.train.global_batch,
            refusal_.empty() ? "" : fmt::format(" (the last refusal: {})", refusal_));
    sort(judged);
    refine(judged);
    result_.model_flops = flops_;
    return std::move(result_);
  }

 private:
  /// Those that are the best with stages cut by time.
  static std::vector<Settings> cut_by_time(const std::vector<Judged>& judged) {
    std::vector<const Judged*> worth;
    for (const Judged& one : judged) {
      if (one.fits && one.stages) worth.push_back(&one);
    }
    std::ranges::stable_sort(worth, {}, [](const Judged* one) { return one->stages->seconds; });
    worth.resize(std::min(kLayoutsToVary, worth.size()));
    std::vector<Settings> cut;
    for (const Judged* one : worth) {
      cut.push_back(one->settings);
      cut.back().parallel.pipeline_layout = one->stages->layout;
    }
    return cut;
  }

  /// The best with merged passes.
  std::vector<Settings> merge(const std::vector<Judged>& judged) const {
    std::vector<Settings> merged;
    for (size_t i = 0; i < std::min(kLayoutsToVary, judged.size()); ++i) {
      if (auto one = merge_passes(space_, judged[i].settings)) merged.push_back(std::move(*one));
    }
    return merged;
  }

  /// The best with other dispatchers.
  std::vector<Settings> dispatch_otherwise(const std::vector<Judged>& judged) const {
    std::vector<Settings> others;
    for (size_t i = 0; i < std::min(kLayoutsToRefine, judged.size()); ++i) {
      for (Settings& one : other_dispatchers(space_, judged[i].settings))
        others.push_back(std::move(one));
    }
    return others;
  }

  /// In the order of `all`, less what the program refuses.
  std::vector<Judged> judge(const std::vector<Settings>& all, double from, double to) {
    std::vector<std::optional<Judged>> found(all.size());
    std::vector<std::string> refusals(all.size());
    begin(from, to, all.size());
    const auto judge_one = [&](size_t i, const PlanPause& /*look*/) {
      try {
        found[i] = judge(all[i]);
      } catch (const UserError& error) {
        refusals[i] = error.what();
      }
      advance();
    };
    run_beside(all.size(), judge_one, pause_);
    std::vector<Judged> judged;
    for (size_t i = 0; i < all.size(); ++i) {
      if (found[i]) {
        judged.push_back(std::move(*found[i]));
      } else {
        refusal_ = refusals[i];
        ++result_.num_refused;
      }
    }
    result_.num_judged += std::ssize(judged);
    return judged;
  }

  /// By few of its stages. What does not fit is taken to get slower in proportion to what it
  /// has to give up of its memory, up to all that can be computed again.
  Judged judge(const Settings& settings) const {
    validate_without_data(settings);
    StageSimulation kept = plan_some(settings);
    Judged judged{.settings = settings, .bytes = kept.most_bytes()};
    if (judged.bytes <= limit_) {
      judged.fits = true;
      judged.seconds = seconds_of(settings, kept);
      judged.stages = other_stages(judged, kept);
      return judged;
    }
    if (!may_choose()) return judged;
    Settings leanest = settings;
    leanest.train.recompute = {"all"};
    StageSimulation lean = plan_some(leanest);
    const int64_t kept_bytes = std::exchange(judged.bytes, lean.most_bytes());
    if (judged.bytes > limit_) return judged;
    judged.fits = true;
    judged.seconds = seconds_of(settings, kept);
    judged.stages = other_stages(judged, kept);
    const double share = static_cast<double>(kept_bytes - limit_) /
                         static_cast<double>(std::max<int64_t>(kept_bytes - judged.bytes, 1));
    judged.seconds += share * (seconds_of(leanest, lean) - judged.seconds);
    return judged;
  }

  std::optional<OtherStages> other_stages(const Judged& judged, StageSimulation& some) const {
    const ModelConfig& model = judged.settings.model;
    const ParallelSpec& parallel = judged.settings.parallel;
    const int64_t stages = parallel.layout.pp;
    const bool may_cut = space_.may_set("parallel.pipeline_layout") &&
                         step_schedule(judged.settings.train) == StepSchedule::kAsBuilt;
    if (stages == 1 || !parallel.pipeline_layout.empty() || !may_cut) return std::nullopt;
    const SimulatedPlans plans = some.run_plans(work_, 1);
    std::vector<RankTimes> ranks;
    for (size_t i = 0; i < plans.plans.size(); ++i)
      ranks.push_back({plans.plans[i], plans.works[i], some.chunks(i)});
    const ModelTimes times = sum_times(model, ranks);
    const double even = busiest_stage(times, make_pipeline_layout(parallel, model.layer_counts()));
    const PipelineLayout cut =
        balance_stages(times, stages, parallel.chunks_per_stage, model.layer_counts());
    const double share = busiest_stage(times, cut) / even;
    if (share > 1 - kWorthCutting) return std::nullopt;
    return OtherStages{write_pipeline_layout(cut), judged.seconds * share};
  }

  bool may_choose() const {
    return space_.may_set("train.recompute") && space_.may_set("train.offload") &&
           !space_.base.train.stashes();
  }

  /// The first stage, the last, and of those between the one with the most layers, where these are
  /// more than the first's.
  StageSimulation plan_some(const Settings& settings) const {
    const std::vector<int64_t> all = first_ranks(settings, space_.num_ranks);
    const PipelineLayout layout =
        make_pipeline_layout(settings.parallel, settings.model.layer_counts());
    std::vector<int64_t> layers(all.size(), 0);
    for (size_t c = 0; c < layout.chunks.size(); ++c)
      layers[c % all.size()] += layout.chunks[c].all_layers();
    std::vector<int64_t> some = {all.front()};
    if (all.size() > 2) {
      const auto most = std::max_element(layers.begin() + 1, layers.end() - 1);
      if (*most > layers.front()) some.push_back(all[most - layers.begin()]);
    }
    if (all.size() > 1) some.push_back(all.back());
    return {settings, space_.num_ranks, some};
  }

  /// What the stages in between add is idle time while a pipeline fills and empties.
  double seconds_of(const Settings& settings, StageSimulation& some) const {
    const Layout layout(settings.parallel.layout, space_.num_ranks);
    const auto count = static_cast<double>(count_micro_batches(settings, layout) *
                                           settings.parallel.chunks_per_stage);
    const double bubble = static_cast<double>(layout.degree(Axis::kPp) - 1) / count;
    return some.run_alone(work_, flops_).seconds * (1 + bubble);
  }

  /// What fits comes first, then what is faster, or smaller.
  static void sort(std::vector<Judged>& judged) {
    std::ranges::stable_sort(judged, [](const Judged& a, const Judged& b) {
      if (a.fits != b.fits) return a.fits;
      return a.fits ? a.seconds < b.seconds : a.bytes < b.bytes;
    });
  }

  void refine(const std::vector<Judged>& judged) {
    const size_t count = std::min(kLayoutsToRefine, judged.size());
    std::vector<PlannedLayout> planned(count);
    begin(0.7, 1, count);
    const auto plan_one = [&](size_t i, const PlanPause& look) {
      planned[i] =
          plan_layout(judged[i].settings, space_.num_ranks, work_, flops_, may_choose(), look);
      advance();
    };
    run_beside(count, plan_one, pause_);
    for (PlannedLayout& layout : planned) {
      if (layout.fits) {
        result_.layouts.push_back(std::move(layout));
      } else if (!result_.least || device_bytes(layout.step) < device_bytes(result_.least->step)) {
        result_.least = std::move(layout);
      }
    }
    std::ranges::stable_sort(result_.layouts, {},
                             [](const PlannedLayout& one) { return one.step.seconds; });
  }

  /// Of a part of the search that has so many pieces.
  void begin(double from, double to, size_t pieces) {
    from_ = from;
    to_ = to;
    pieces_ = static_cast<double>(pieces);
    done_ = 0;
    if (pause_) pause_();
    tell(from);
  }

  void advance() {
    const std::scoped_lock lock(mutex_);
    done_ += 1;
    tell(from_ + (to_ - from_) * done_ / pieces_);
  }

  void tell(double share) const {
    if (progress_) progress_(share);
  }

  const SearchSpace& space_;
  const StepWork& work_;
  const PlanProgress& progress_;
  const PlanPause& pause_;
  double flops_;
  int64_t limit_;
  std::string refusal_;
  PlanResult result_;
  std::mutex mutex_;  // of what follows
  double from_ = 0;
  double to_ = 0;
  double pieces_ = 1;
  double done_ = 0;
};

/// What a configuration's memory must keep to.
MemoryLimit limit_of(const Settings& settings, int64_t num_ranks, const Hardware& hardware) {
  MemoryLimit limit = limit_of_device(hardware.name, hardware.memory_bytes(), 1);
  if (const auto given = given_limit(settings.train)) limit = *given;
  limit.host_bytes = hardware.host_memory_bytes() / std::min(hardware.node_devices, num_ranks);
  return limit;
}

void add_names(std::vector<std::string>& names, const std::vector<std::string>& more) {
  for (const std::string& name : more) {
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
}

/// What all layers compute again or offload so that this rank keeps to the limit, or else comes
/// as near to it as it can.
void choose_for_rank(Settings& settings, int64_t rank, int64_t num_ranks, MemoryLimit limit) {
  const PlannedRank planned = plan_rank(settings, rank, num_ranks);
  const ModelState::Bytes state =
      ModelState::count_bytes(settings, planned.layout, planned.backend);
  const PolicyTrial trial(settings, planned, state);
  const PolicySearchResult found =
      search_policy(trial, settings.train.saved_policy(), limit, PolicyGrain::kUniform);
  const LayerChoices& choices = found.fits ? found.best.choices : found.least.choices;
  for (const auto& [layer, choice] : choices) {
    add_names(settings.train.recompute, choice.recompute);
    add_names(settings.train.offload, choice.offload);
  }
}

}  // namespace

int64_t memory_of(const Settings& settings, const Hardware& hardware) {
  const MemoryLimit limit = limit_of(settings, 1, hardware);
  return limit.bytes - limit.spare;
}

PlannedLayout plan_layout(const Settings& settings, int64_t num_ranks, const StepWork& work,
                          double flops, bool may_choose, const PlanPause& pause) {
  const Hardware& hardware = work.hardware();
  const MemoryLimit limit = limit_of(settings, num_ranks, hardware);
  PlannedLayout planned{.settings = settings};
  planned.settings.train.offload_rate = hardware.host_gbs;
  std::set<int64_t> chosen_for;
  while (true) {
    if (pause) pause();
    StageSimulation stages(planned.settings, num_ranks, first_ranks(settings, num_ranks));
    const bool fits = stages.most_bytes() <= limit.bytes - limit.spare;
    const int64_t fullest = stages.fullest();
    // Each stage once, as long as one does not fit.
    if (!fits && may_choose && chosen_for.insert(fullest).second) {
      choose_for_rank(planned.settings, fullest, num_ranks, limit);
      continue;
    }
    if (pause) pause();
    planned.step = stages.run(work, flops);
    planned.fits = fits && fits_host(planned.step, hardware);
    return planned;
  }
}

PlanResult search_plan(const SearchSpace& space, const StepWork& work, const PlanProgress& progress,
                       const PlanPause& pause) {
  return Search(space, work, progress, pause).run();
}

}  // namespace tessera
