#include "train/plan/search.h"

#include <algorithm>
#include <set>

#include "train/setup/device_choice.h"
#include "train/state/choose_policy.h"

namespace tessera {
namespace {

/// Layouts whose variants are judged, and configurations that are simulated as a whole.
constexpr size_t kLayoutsToVary = 24;
constexpr size_t kLayoutsToRefine = 16;

/// A configuration that was judged by some of its stages.
struct Judged {
  Settings settings;
  double seconds = 0;
  int64_t bytes = 0;  ///< of the fullest stage
  bool fits = false;
};

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
  Search(const SearchSpace& space, const StepWork& work, const PlanProgress& progress)
      : space_(space),
        work_(work),
        progress_(progress),
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
    for (Judged& one : judge(variants, 0.4, 0.7)) judged.push_back(std::move(one));
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
  std::vector<Judged> judge(const std::vector<Settings>& all, double from, double to) {
    std::vector<Judged> judged;
    for (size_t i = 0; i < all.size(); ++i) {
      tell(from + (to - from) * static_cast<double>(i) / static_cast<double>(all.size()));
      if (std::optional<Judged> one = judge(all[i])) judged.push_back(std::move(*one));
    }
    return judged;
  }

  /// By its first and last stage; nothing where the program refuses it.
  std::optional<Judged> judge(const Settings& settings) {
    try {
      validate_without_data(settings);
      Judged one = judge_stages(settings);
      if (!one.fits && may_choose()) {
        Settings leanest = settings;
        leanest.train.recompute = {"all"};
        Judged lean = judge_stages(leanest);
        lean.settings = settings;
        one = std::move(lean);
      }
      ++result_.num_judged;
      return one;
    } catch (const UserError& error) {
      refusal_ = error.what();
      ++result_.num_refused;
      return std::nullopt;
    }
  }

  bool may_choose() const {
    return space_.may_set("train.recompute") && space_.may_set("train.offload");
  }

  Judged judge_stages(const Settings& settings) {
    const std::vector<int64_t> all = first_ranks(settings, space_.num_ranks);
    const auto stages = static_cast<int64_t>(all.size());
    std::vector<int64_t> some = {all.front()};
    if (stages > 1) some.push_back(all.back());
    const SimulatedStep step = simulate_stages(settings, space_.num_ranks, work_, flops_, some);
    // What stages in between add is idle time while a pipeline fills and empties.
    const auto count =
        static_cast<double>(settings.train.num_micro_batches() /
                            Layout(settings.parallel.layout, space_.num_ranks).degree(Axis::kDp) *
                            settings.parallel.chunks_per_stage);
    const double bubble = static_cast<double>(std::max<int64_t>(stages - 2, 0)) / count;
    const int64_t bytes = device_bytes(step);
    return {.settings = settings,
            .seconds = step.seconds * (1 + bubble),
            .bytes = bytes,
            .fits = bytes <= limit_};
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
    for (size_t i = 0; i < count; ++i) {
      tell(0.7 + 0.3 * static_cast<double>(i) / static_cast<double>(count));
      PlannedLayout layout =
          plan_layout(judged[i].settings, space_.num_ranks, work_, flops_, may_choose());
      if (layout.fits) {
        result_.layouts.push_back(std::move(layout));
      } else if (!result_.least || device_bytes(layout.step) < device_bytes(result_.least->step)) {
        result_.least = std::move(layout);
      }
    }
    std::ranges::stable_sort(result_.layouts, {},
                             [](const PlannedLayout& one) { return one.step.seconds; });
    tell(1);
  }

  void tell(double share) const {
    if (progress_) progress_(share);
  }

  const SearchSpace& space_;
  const StepWork& work_;
  const PlanProgress& progress_;
  double flops_;
  int64_t limit_;
  std::string refusal_;
  PlanResult result_;
};

/// What is computed again or offloaded so that a configuration fits, as far as it can be.
void choose_within(Settings& settings, int64_t num_ranks, const Hardware& hardware) {
  const MemoryLimit limit{
      .bytes = memory_of(settings, hardware),
      .host_bytes = hardware.host_memory_bytes() / std::min(hardware.node_devices, num_ranks)};
  settings.train.offload_rate = hardware.host_gbs;
  const PolicyChoice choice = choose_policy(settings, num_ranks, plan_backend(settings, num_ranks),
                                            batch_shape(settings), limit);
  apply(choice, settings.train);
}

}  // namespace

int64_t memory_of(const Settings& settings, const Hardware& hardware) {
  return settings.train.parse_memory_limit().value_or(hardware.memory_bytes());
}

PlannedLayout plan_layout(const Settings& settings, int64_t num_ranks, const StepWork& work,
                          double flops, bool may_choose) {
  const Hardware& hardware = work.hardware();
  const auto judge = [&](const Settings& one) {
    PlannedLayout planned{.settings = one, .step = simulate_step(one, num_ranks, work, flops)};
    planned.fits =
        device_bytes(planned.step) <= memory_of(one, hardware) && fits_host(planned.step, hardware);
    return planned;
  };
  PlannedLayout kept = judge(settings);
  if (kept.fits || !may_choose) return kept;
  Settings chosen = settings;
  try {
    choose_within(chosen, num_ranks, hardware);
  } catch (const UserError&) {
    return kept;  // nothing fits
  }
  return judge(chosen);
}

PlanResult search_plan(const SearchSpace& space, const StepWork& work,
                       const PlanProgress& progress) {
  return Search(space, work, progress).run();
}

}  // namespace tessera
