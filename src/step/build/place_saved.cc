#include "step/build/place_saved.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "core/memory.h"
#include "program/memory_plan.h"
#include "step/build/plan_offload.h"
#include "step/build/step_runs.h"

namespace tessera {
namespace {

/// A slab and when it is alive: stretches of runs, one behind the other.
struct Slab {
  int64_t num_bytes = 0;
  std::vector<Lifetime> lives;
  int64_t* offset = nullptr;
};

bool meet(const Slab& a, const Slab& b) {
  size_t i = 0;
  size_t j = 0;
  while (i < a.lives.size() && j < b.lives.size()) {
    if (a.lives[i].last < b.lives[j].first) {
      ++i;
    } else if (b.lives[j].last < a.lives[i].first) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

/// Collects the slabs of a step's runs.
class SlabFinder {
 public:
  SlabFinder(const StagePrograms& programs, SavedPlacement& placement)
      : programs_(programs), placement_(placement) {
    for (const LayerOffload& offload : placement.offloads) offloads_[offload.forward] = &offload;
  }

  void add(const StepRun& run, int at) {
    const int64_t idx = run.ref.idx;
    SavedOffsets& offsets = placement_.offsets[run.chunk][run.place];
    const PipelineChunk& chunk = programs_.part.chunks[run.chunk];
    const bool forward = run.ref.direction == PassDirection::kForward;
    const bool begins = forward && run.part.is_first();
    if (run.ref.part == ProgramPart::kHead)
      return touch(offsets.heads.at(idx), head_saved_bytes(programs_, idx), begins, at);
    if (run.ref.part != ProgramPart::kLayer) return;
    touch(offsets.layers.at(idx), layer_saved_bytes(programs_, chunk, idx), begins, at);
    touch(offsets.offloaded.at(idx), layer_offloaded_bytes(programs_, chunk, idx), begins, at);
    if (const auto offload = offloads_.find(at); offload != offloads_.end())
      split(*offload->second, offsets);
    if (forward) return;
    touch(offsets.kept.at(idx), layer_kept_bytes(programs_, chunk, idx),
          run.ref.direction == PassDirection::kBackward && run.part.is_first(), at);
  }

  std::vector<Slab> take() {
    std::vector<Slab> slabs;
    for (auto& [offset, slab] : slabs_) slabs.push_back(std::move(slab));
    return slabs;
  }
  std::vector<Slab> take_host() {
    std::vector<Slab> slabs;
    for (auto& [offset, slab] : host_slabs_) slabs.push_back(std::move(slab));
    return slabs;
  }

 private:
  void touch(int64_t& offset, int64_t bytes, bool begins, int at) {
    if (bytes == 0) return;
    const auto [found, is_new] = numbers_.try_emplace(&offset, numbers_.size());
    Slab& slab = slabs_[found->second];
    slab.num_bytes = align_up(bytes, kSlabAlignment);
    slab.offset = &offset;
    if (begins) {
      slab.lives.push_back({at, at});
    } else {
      slab.lives.back().last = at;
    }
  }

  /// A part that waits in the host's memory: two lives in the device's, one in the host's, which is
  /// counted in the gaps between runs, each named by the run behind it.
  void split(const LayerOffload& offload, SavedOffsets& offsets) {
    Slab& slab = slabs_.at(numbers_.at(&offsets.offloaded.at(offload.layer)));
    slab.lives.back().last = offload.stored - 1;
    slab.lives.push_back({offload.reload, offload.backward});
    Slab& host = host_slabs_[{offload.chunk, offload.place, offload.layer}];
    host.num_bytes = slab.num_bytes;
    host.offset = &offsets.host.at(offload.layer);
    host.lives.push_back({offload.forward + 1, offload.backward});
  }

  const StagePrograms& programs_;
  SavedPlacement& placement_;
  std::map<int, const LayerOffload*> offloads_;  // by their forward run
  std::map<std::tuple<int64_t, int64_t, int64_t>, Slab> host_slabs_;
  std::map<int64_t*, size_t> numbers_;
  std::map<size_t, Slab> slabs_;  // in the order in which they are first used
};

int64_t place(std::vector<Slab>& slabs) {
  std::ranges::stable_sort(slabs, std::greater<>(), &Slab::num_bytes);
  std::vector<const Slab*> placed;  // by offset
  int64_t total = 0;
  for (const Slab& slab : slabs) {
    int64_t offset = 0;
    for (const Slab* other : placed) {
      if (!meet(slab, *other)) continue;
      if (offset + slab.num_bytes <= *other->offset) break;
      offset = std::max(offset, *other->offset + other->num_bytes);
    }
    *slab.offset = offset;
    total = std::max(total, offset + slab.num_bytes);
    const auto at =
        std::ranges::upper_bound(placed, offset, {}, [](const Slab* s) { return *s->offset; });
    placed.insert(at, &slab);
  }
  return total;
}

/// What is stashed between a layer's forward and its backward run counts in both, since they may be
/// run in parts, beside others.
StashNeed find_stash(const StagePrograms& programs, const std::vector<StepRun>& runs) {
  StashNeed most;
  StashNeed now;
  for (const StepRun& run : runs) {
    if (run.ref.part != ProgramPart::kLayer) continue;
    const StashNeed own = layer_stash(programs, programs.part.chunks[run.chunk], run.ref.idx);
    const bool forward = run.ref.direction == PassDirection::kForward;
    if (forward && run.part.is_first()) now += own;
    most = larger(most, now);
    if (!forward && run.part.is_last()) now -= own;
  }
  return most;
}

}  // namespace

SavedPlacement place_saved(const StagePrograms& programs, const std::vector<PipelineStep>& steps) {
  SavedPlacement placement = list_saved(programs);
  const std::vector<StepRun> runs = list_step_passes(programs, nullptr, steps).runs;
  placement.offloads = plan_offload(programs, runs);
  SlabFinder finder(programs, placement);
  int at = 0;
  for (const StepRun& run : runs) finder.add(run, at++);
  std::vector<Slab> host_slabs = finder.take_host();
  placement.host_bytes = place(host_slabs);
  std::vector<Slab> slabs = finder.take();
  placement.num_bytes = place(slabs);
  placement.stash = find_stash(programs, runs);
  return placement;
}

}  // namespace tessera
