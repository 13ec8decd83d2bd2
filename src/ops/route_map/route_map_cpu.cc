#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/route_map/route_map.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

/// The kernel's inputs, outputs and scratch memory. An *assignment* is t·K + k.
struct Routing {
  const RouteMapSpec* spec;
  int64_t num_assignments;
  int64_t capacity;
  const int32_t* expert_of;
  const float* probs;

  int32_t* row_of;
  int32_t* source_of;
  int64_t* offsets;
  int64_t* counts_kept;

  int64_t* counters_RunE;  ///< assignments by run and expert, then their places in `sorted`
  int64_t* starts;         ///< [E + 1] the first place of each expert in `sorted`
  int32_t* sorted;         ///< assignments by expert

  int64_t run_begin(int64_t run) const { return num_assignments * run / RouteMap::kNumRuns; }
  int64_t* counters(int64_t run) const { return counters_RunE + run * spec->num_experts; }
};

Routing bind(const RouteMap& op, const KernelArgs& args) {
  const RouteMapWorkspace layout(args.in(0).num_elements(), op.spec().num_experts);
  return {.spec = &op.spec(),
          .num_assignments = args.in(0).num_elements(),
          .capacity = op.capacity(args.in(0).shape[0]),
          .expert_of = args.in(0).as<int32_t>(),
          .probs = args.in(1).as<float>(),
          .row_of = args.out(RouteMapOutput::kRowOfTK).as<int32_t>(),
          .source_of = args.out(RouteMapOutput::kSourceR).as<int32_t>(),
          .offsets = args.out(RouteMapOutput::kOffsets).as<int64_t>(),
          .counts_kept = args.out(RouteMapOutput::kCountsKept).as<int64_t>(),
          .counters_RunE = workspace_part<int64_t>(args.workspace, layout.counters),
          .starts = workspace_part<int64_t>(args.workspace, layout.starts),
          .sorted = workspace_part<int32_t>(args.workspace, layout.sorted)};
}

void check_experts(const Routing& r) {
  int64_t num_bad = 0;
#pragma omp parallel for reduction(+ : num_bad)
  for (int64_t i = 0; i < r.num_assignments; ++i) {
    num_bad += r.expert_of[i] < 0 || r.expert_of[i] >= r.spec->num_experts;
  }
  ensure(num_bad == 0, "route_map: {} expert indices are outside 0..{}", num_bad,
         r.spec->num_experts - 1);
}

void count_runs(const Routing& r) {
#pragma omp parallel for schedule(static)
  for (int64_t run = 0; run < RouteMap::kNumRuns; ++run) {
    int64_t* counters = r.counters(run);
    std::fill_n(counters, r.spec->num_experts, 0);
    for (int64_t i = r.run_begin(run); i < r.run_begin(run + 1); ++i) ++counters[r.expert_of[i]];
  }
}

/// Turns counts into places: expert by expert, and within an expert run by run.
void place_runs(const Routing& r) {
  int64_t place = 0;
  for (int64_t expert = 0; expert < r.spec->num_experts; ++expert) {
    r.starts[expert] = place;
    for (int64_t run = 0; run < RouteMap::kNumRuns; ++run) {
      int64_t& counter = r.counters(run)[expert];
      const int64_t count = counter;
      counter = place;
      place += count;
    }
  }
  r.starts[r.spec->num_experts] = place;
}

void sort_runs(const Routing& r) {
#pragma omp parallel for schedule(static)
  for (int64_t run = 0; run < RouteMap::kNumRuns; ++run) {
    int64_t* places = r.counters(run);
    for (int64_t i = r.run_begin(run); i < r.run_begin(run + 1); ++i) {
      r.sorted[places[r.expert_of[i]]++] = static_cast<int32_t>(i);
    }
  }
}

/// Lays out the experts' rows; returns how many assignments are dropped.
int64_t place_experts(const Routing& r) {
  int64_t row = 0;
  int64_t dropped = 0;
  for (int64_t expert = 0; expert < r.spec->num_experts; ++expert) {
    const int64_t count = r.starts[expert + 1] - r.starts[expert];
    const int64_t kept = std::min(count, r.capacity);
    r.offsets[expert] = row;
    r.counts_kept[expert] = kept;
    dropped += count - kept;
    row += align_up(r.spec->pad_to_capacity ? r.capacity : kept, r.spec->alignment);
  }
  r.offsets[r.spec->num_experts] = row;
  return dropped;
}

/// Moves the assignments that the expert keeps to the front of its run, still in token order.
void choose_kept(const Routing& r, int64_t expert) {
  int32_t* first = r.sorted + r.starts[expert];
  int32_t* last = r.sorted + r.starts[expert + 1];
  int32_t* kept_end = first + r.counts_kept[expert];
  if (kept_end == last || r.spec->drop_policy == DropPolicy::kPosition) return;
  const auto key = [&](int32_t i) {  // a NaN would break the strict order
    return std::isnan(r.probs[i]) ? -std::numeric_limits<float>::infinity() : r.probs[i];
  };
  std::nth_element(first, kept_end, last, [&](int32_t a, int32_t b) {
    return key(a) > key(b) || (key(a) == key(b) && a < b);
  });
  std::sort(first, kept_end);
}

void write_expert(const Routing& r, int64_t expert) {
  choose_kept(r, expert);
  const int32_t* sorted = r.sorted + r.starts[expert];
  const int64_t count = r.starts[expert + 1] - r.starts[expert];
  const int64_t kept = r.counts_kept[expert];
  for (int64_t i = 0; i < kept; ++i) {
    r.source_of[r.offsets[expert] + i] = sorted[i];
    r.row_of[sorted[i]] = static_cast<int32_t>(r.offsets[expert] + i);
  }
  for (int64_t i = kept; i < count; ++i) r.row_of[sorted[i]] = -1;
  std::fill(r.source_of + r.offsets[expert] + kept, r.source_of + r.offsets[expert + 1], -1);
}

void route_map(const Operator& op, const KernelArgs& args) {
  const Routing r = bind(static_cast<const RouteMap&>(op), args);
  check_experts(r);
  count_runs(r);
  place_runs(r);
  sort_runs(r);
  *args.out(RouteMapOutput::kDropped).as<int64_t>() = place_experts(r);
#pragma omp parallel for schedule(dynamic)
  for (int64_t expert = 0; expert < r.spec->num_experts; ++expert) write_expert(r, expert);
  *args.out(RouteMapOutput::kExtent).as<int64_t>() = r.offsets[r.spec->num_experts];
}

}  // namespace

void add_route_map_cpu(KernelTable& table) {
  table["route_map"] = route_map;
}

}  // namespace tessera
