#include "step/build/plan_offload.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace tessera {
namespace {

// What one Hopper GPU reaches in products of this size, and of its memory's 4.8 TB/s; each kernel
// and each copy has a start besides.
constexpr double kFlops = 6e14;
constexpr double kMemoryBytes = 3.5e12;
constexpr double kKernelSeconds = 2e-6;
constexpr double kCopySeconds = 1e-5;

double seconds_of(const Executable& executable) {
  const Program& program = executable.program();
  const Cost cost = program.cost();
  return cost.flops / kFlops + cost.bytes / kMemoryBytes +
         kKernelSeconds * static_cast<double>(program.nodes().size());
}

class OffloadPlanner {
 public:
  OffloadPlanner(const StagePrograms& programs, const std::vector<StepRun>& runs)
      : programs_(programs) {
    find_times(runs);
    find_candidates(runs);
    find_slacks();
  }

  /// The most that can be in time, of what has the most time to spare: where some cannot, none
  /// can with more beside them.
  std::vector<LayerOffload> plan() && {
    size_t feasible = 0;
    size_t too_many = slacks_.size() + 1;
    while (too_many - feasible > 1) {
      const size_t middle = (feasible + too_many) / 2;
      auto trial = choose(middle);
      (place(trial) ? feasible : too_many) = middle;
    }
    std::vector<LayerOffload> offloads;
    auto chosen = choose(feasible);
    place(chosen);
    for (const Candidate& one : chosen) offloads.push_back(one.offload);
    return offloads;
  }

 private:
  struct Candidate {
    LayerOffload offload;
    double seconds = 0;  ///< of a copy
  };

  void find_times(const std::vector<StepRun>& runs) {
    std::map<const Executable*, double> known;
    double now = 0;
    for (const StepRun& run : runs) {
      const auto [found, is_new] = known.try_emplace(run.executable, 0);
      if (is_new) found->second = seconds_of(*run.executable);
      begins_.push_back(now);
      ends_.push_back(now += found->second);
    }
  }

  /// The forward runs of layers that have something to offload, with their first backward run.
  void find_candidates(const std::vector<StepRun>& runs) {
    std::map<std::tuple<int64_t, int64_t, int64_t>, size_t> open;  // by chunk, layer, micro-batch
    for (size_t i = 0; i < runs.size(); ++i) {
      const StepRun& run = runs[i];
      if (run.ref.part != ProgramPart::kLayer) continue;
      const int64_t bytes =
          layer_moved_bytes(programs_, programs_.part.chunks[run.chunk], run.ref.idx);
      if (bytes == 0) continue;
      const auto key = std::tuple(run.chunk, run.ref.idx, run.micro_batch);
      if (run.ref.direction == PassDirection::kForward) {
        open[key] = candidates_.size();
        const double seconds =
            kCopySeconds + static_cast<double>(bytes) / programs_.policy.offload.link_bytes;
        candidates_.push_back({{.chunk = run.chunk,
                                .place = run.place,
                                .layer = run.ref.idx,
                                .micro_batch = run.micro_batch,
                                .forward = static_cast<int>(i)},
                               seconds});
      } else if (run.ref.direction == PassDirection::kBackward) {
        candidates_[open.at(key)].offload.backward = static_cast<int>(i);
      }
    }
  }

  /// Layers keep their address, so one of a place is offloaded in all its micro-batches or in none.
  using Group = std::tuple<int64_t, int64_t, int64_t>;
  static Group group_of(const LayerOffload& offload) {
    return {offload.chunk, offload.place, offload.layer};
  }

  /// Of each group the time that its copies would leave at least, the longest first.
  void find_slacks() {
    std::map<Group, double> least;
    for (const Candidate& one : candidates_) {
      const LayerOffload& offload = one.offload;
      const double slack = begins_[offload.backward] - ends_[offload.forward] - 2 * one.seconds;
      const auto [found, is_new] = least.try_emplace(group_of(offload), slack);
      if (!is_new) found->second = std::min(found->second, slack);
    }
    for (const auto& [group, slack] : least) slacks_.emplace_back(slack, group);
    std::ranges::stable_sort(slacks_, std::greater<>(), &std::pair<double, Group>::first);
  }

  std::vector<Candidate> choose(size_t num_groups) const {
    std::set<Group> groups;
    for (size_t i = 0; i < num_groups; ++i) groups.insert(slacks_[i].second);
    std::vector<Candidate> chosen;
    std::ranges::copy_if(candidates_, std::back_inserter(chosen), [&](const Candidate& one) {
      return groups.contains(group_of(one.offload));
    });
    return chosen;
  }

  /// Says when copies begin and end; false where one would have to be back before it is away.
  bool place(std::vector<Candidate>& candidates) const {
    place_reloads(candidates);
    double free_at = 0;
    for (Candidate& one : candidates) {
      free_at = std::max(free_at, ends_[one.offload.forward]) + one.seconds;
      one.offload.stored = run_after(free_at, one.offload.forward);
      if (one.offload.stored >= one.offload.reload) return false;
    }
    return true;
  }

  /// Behind run `after` and the one that follows it, the first run that begins at `time` or later;
  /// their number where none does.
  int run_after(double time, int after) const {
    const auto from = begins_.begin() + std::min<ptrdiff_t>(after + 2, std::ssize(begins_));
    return static_cast<int>(std::lower_bound(from, begins_.end(), time) - begins_.begin());
  }

  /// From the last that is needed to the first.
  void place_reloads(std::vector<Candidate>& candidates) const {
    std::vector<Candidate*> by_need;
    for (Candidate& one : candidates) by_need.push_back(&one);
    std::ranges::sort(by_need, std::greater<>(),
                      [](const Candidate* one) { return one->offload.backward; });
    double free_until = ends_.empty() ? 0 : ends_.back();
    for (Candidate* one : by_need) {
      LayerOffload& offload = one->offload;
      free_until = std::min(free_until, begins_[offload.backward]) - one->seconds;
      const auto later = std::ranges::upper_bound(begins_, free_until);
      const int latest = static_cast<int>(later - begins_.begin()) - 1;
      offload.reload = std::max(std::min(latest, offload.backward - 1), 0);
    }
  }

  const StagePrograms& programs_;
  std::vector<double> begins_, ends_;  // by run, in seconds
  std::vector<Candidate> candidates_;  // in the order of their forward runs
  std::vector<std::pair<double, Group>> slacks_;
};

}  // namespace

std::vector<LayerOffload> plan_offload(const StagePrograms& programs,
                                       const std::vector<StepRun>& runs) {
  return OffloadPlanner(programs, runs).plan();
}

}  // namespace tessera
