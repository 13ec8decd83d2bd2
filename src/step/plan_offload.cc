#include "step/plan_offload.h"

#include <algorithm>
#include <map>
#include <tuple>

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
  }

  std::vector<LayerOffload> plan() && {
    std::vector<Candidate> chosen;
    plan_reloads(candidates_);
    double free_at = 0;
    for (Candidate& one : candidates_) {
      const double end = std::max(free_at, ends_[one.offload.forward]) + one.seconds;
      one.offload.stored = run_after(end, one.offload.forward);
      if (one.offload.stored >= one.offload.reload) continue;
      free_at = end;
      chosen.push_back(one);
    }
    plan_reloads(chosen);  // fewer of them, so none begins earlier than before
    std::vector<LayerOffload> offloads;
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
          layer_offloaded_bytes(programs_, programs_.part.chunks[run.chunk], run.ref.idx);
      if (bytes == 0) continue;
      const auto key = std::tuple(run.chunk, run.ref.idx, run.micro_batch);
      if (run.ref.direction == PassDirection::kForward) {
        open[key] = candidates_.size();
        const double seconds =
            kCopySeconds + static_cast<double>(bytes) / programs_.offload.link_bytes;
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

  /// Behind run `after` and the one that follows it, the first run that begins at `time` or later;
  /// their number where none does.
  int run_after(double time, int after) const {
    const auto from = begins_.begin() + std::min<ptrdiff_t>(after + 2, std::ssize(begins_));
    return static_cast<int>(std::lower_bound(from, begins_.end(), time) - begins_.begin());
  }

  /// From the last that is needed to the first.
  void plan_reloads(std::vector<Candidate>& candidates) const {
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
  std::vector<Candidate> candidates_;
};

}  // namespace

std::vector<LayerOffload> plan_offload(const StagePrograms& programs,
                                       const std::vector<StepRun>& runs) {
  return OffloadPlanner(programs, runs).plan();
}

}  // namespace tessera
