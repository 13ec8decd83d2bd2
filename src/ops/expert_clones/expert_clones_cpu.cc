#include <algorithm>
#include <numeric>

#include "ops/expert_clones/clone_exchange.h"
#include "ops/expert_clones/clone_plan_workspace.h"
#include "ops/expert_clones/clone_split.h"

namespace tessera {
namespace {

/// Finds the clones, one after the other.
class ClonePlanner {
 public:
  ClonePlanner(const CloneSlots& spec, std::span<const int64_t> counts, std::span<int64_t> slots,
               std::span<std::byte> workspace)
      : spec_(spec), counts_(counts), slots_(slots) {
    const ClonePlanWorkspace layout(spec);
    const auto part = [&](int64_t offset, int64_t count) {
      return std::span(workspace_part<int64_t>(workspace, offset), static_cast<size_t>(count));
    };
    rest_ = part(layout.rest, spec.num_experts);
    loads_ = part(layout.loads, spec.num_ranks);
    filled_ = part(layout.filled, spec.num_ranks);
    quotas_ = part(layout.quotas, spec.num_slots());
  }

  void run() {
    add_up();
    while (clone_one()) {
    }
    for (int64_t rank = 0; rank < spec_.num_ranks; ++rank) sort_slots(rank);
  }

  CloneSplit split() const {
    return {.counts = counts_.data(),
            .slots = slots_.data(),
            .quotas = quotas_.data(),
            .num_experts = spec_.num_experts,
            .num_ranks = spec_.num_ranks,
            .rank = spec_.rank,
            .slots_per_rank = spec_.slots_per_rank};
  }

 private:
  void add_up() {
    std::ranges::fill(slots_, -1);
    std::ranges::fill(quotas_, 0);
    std::ranges::fill(loads_, 0);
    std::ranges::fill(filled_, 0);
    for (int64_t expert = 0; expert < spec_.num_experts; ++expert) {
      rest_[expert] = 0;
      for (int64_t rank = 0; rank < spec_.num_ranks; ++rank)
        rest_[expert] += counts_[rank * spec_.num_experts + expert];
      loads_[spec_.home_of(expert)] += rest_[expert];
    }
    const int64_t total = std::accumulate(loads_.begin(), loads_.end(), int64_t{0});
    mean_ = (total + spec_.num_ranks - 1) / spec_.num_ranks;
  }

  /// False where no rank has too much, or nobody can take it.
  bool clone_one() {
    const int64_t giver = std::ranges::max_element(loads_) - loads_.begin();
    const int64_t surplus = loads_[giver] - mean_;
    if (surplus <= mean_ / kCloneTolerance) return false;
    const int64_t taker = find_taker();
    if (taker < 0) return false;
    const auto local = rest_.subspan(giver * spec_.num_local(), spec_.num_local());
    const auto expert = std::ranges::max_element(local);
    const int64_t tokens = std::min({surplus, *expert, mean_ - loads_[taker]});
    *expert -= tokens;
    loads_[giver] -= tokens;
    loads_[taker] += tokens;
    const int64_t slot = taker * spec_.slots_per_rank + filled_[taker]++;
    slots_[slot] = giver * spec_.num_local() + (expert - local.begin());
    quotas_[slot] = tokens;
    return true;
  }

  /// The emptiest rank below the mean with a free slot; -1: there is none.
  int64_t find_taker() const {
    int64_t taker = -1;
    for (int64_t rank = 0; rank < spec_.num_ranks; ++rank) {
      if (filled_[rank] == spec_.slots_per_rank || loads_[rank] >= mean_) continue;
      if (taker < 0 || loads_[rank] < loads_[taker]) taker = rank;
    }
    return taker;
  }

  void sort_slots(int64_t rank) {
    const int64_t first = rank * spec_.slots_per_rank;
    for (int64_t i = first + 1; i < first + filled_[rank]; ++i) {
      for (int64_t j = i; j > first && slots_[j] < slots_[j - 1]; --j) {
        std::swap(slots_[j], slots_[j - 1]);
        std::swap(quotas_[j], quotas_[j - 1]);
      }
    }
  }

  const CloneSlots& spec_;
  std::span<const int64_t> counts_;
  std::span<int64_t> slots_;
  std::span<int64_t> rest_;
  std::span<int64_t> loads_;
  std::span<int64_t> filled_;
  std::span<int64_t> quotas_;
  int64_t mean_ = 0;
};

void clone_plan(const ClonePlan& op, const Args<ClonePlan>& args) {
  const CloneSlots& spec = op.slots();
  const auto counts = args.in(ClonePlan::kCounts).span<int64_t>();
  ensure(std::ranges::all_of(counts, [](int64_t count) { return count >= 0; }),
         "clone_plan: a count is negative");
  ClonePlanner planner(spec, counts, args.out(ClonePlan::kSlots).span<int64_t>(), args.workspace);
  planner.run();
  const CloneSplit split = planner.split();
  const auto begins = args.out(ClonePlan::kBegins).span<int64_t>();
  const auto ends = args.out(ClonePlan::kEnds).span<int64_t>();
  for (int64_t slot = 0; slot < spec.num_slots(); ++slot) {
    const CloneSplit::Range range = split.of(slot);
    begins[slot] = range.begin;
    ends[slot] = range.end;
  }
}

int64_t clone_plan_workspace(const ClonePlan& op, std::span<const ValueType> /*inputs*/) {
  return ClonePlanWorkspace(op.slots()).num_bytes;
}

void clone_route(const CloneRoute& op, const Args<CloneRoute>& args) {
  using Op = CloneRoute;
  const auto expert_idx = args.in(Op::kExpertIdx).span<int32_t>();
  const auto row_of = args.in(Op::kRowOf).span<int32_t>();
  const auto offsets = args.in(Op::kOffsets).span<int64_t>();
  const auto slots = args.in(Op::kSlots).span<int64_t>();
  const auto begins = args.in(Op::kBegins).span<int64_t>();
  const auto ends = args.in(Op::kEnds).span<int64_t>();
  const auto home_idx = args.out(Op::kHomeIdx).span<int32_t>();
  const auto clone_idx = args.out(Op::kCloneIdx).span<int32_t>();
  std::ranges::copy(expert_idx, home_idx.begin());
  std::ranges::fill(clone_idx, -1);
  if (!clones::has_clones(slots)) return;
  const int64_t num_slots = op.slots().num_slots();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < std::ssize(expert_idx); ++i) {
    if (row_of[i] < 0) continue;
    const int64_t place = row_of[i] - offsets[expert_idx[i]];
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      if (slots[slot] != expert_idx[i] || place < begins[slot] || place >= ends[slot]) continue;
      home_idx[i] = -1;
      clone_idx[i] = static_cast<int32_t>(slot);
    }
  }
}

void add_clones(const AddClones& op, const Args<AddClones>& args) {
  if (!args.out(AddClones::kGradWeight)) return;
  const CloneSlots& spec = op.slots();
  const auto sums = args.out(AddClones::kGradWeight).span<float>();
  const int64_t block = std::ssize(sums) / spec.num_local();
  const float* returned = args.in(AddClones::kReturned).as<float>();
  for (const int64_t expert : args.in(AddClones::kSlots).span<int64_t>()) {
    if (expert < 0 || spec.home_of(expert) != spec.rank) continue;
    float* sum = sums.data() + (expert - spec.rank * spec.num_local()) * block;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < block; ++i) sum[i] += returned[i];
    returned += block;
  }
}

std::vector<int64_t> read_slots(const KernelArgs& /*args*/, const Tensor& slots) {
  const auto numbers = slots.span<int64_t>();
  return {numbers.begin(), numbers.end()};
}

}  // namespace

void add_expert_clones_cpu(KernelTable& table) {
  add_kernel<ClonePlan>(table, clone_plan,
                        {.workspace = clone_plan_workspace, .tells_the_host = true});
  add_kernel<CloneRoute>(table, clone_route);
  add_kernel<AddClones>(table, add_clones);
  clones::add_exchanges<read_slots>(table);
}

}  // namespace tessera
