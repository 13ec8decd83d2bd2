#include "ops/route_map/expert_sort.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera {
namespace {

constexpr int64_t kNumRuns = ExpertSortWorkspace::kNumRuns;

}  // namespace

ExpertSortWorkspace::ExpertSortWorkspace(int64_t num_assignments, int64_t num_local) {
  WorkspaceLayout layout;
  counters = layout.add<int64_t>(kNumRuns * num_local);
  starts = layout.add<int64_t>(num_local + 1);
  kept_starts = layout.add<int64_t>(num_local);
  sorted = layout.add<int32_t>(num_assignments);
  num_bytes = layout.num_bytes();
}

ExpertSort ExpertSort::in_workspace(const RouteMapSpec& spec, int64_t num_assignments,
                                    std::span<std::byte> workspace) {
  const ExpertSortWorkspace layout(num_assignments, spec.num_local());
  return {.spec = &spec,
          .num_assignments = num_assignments,
          .capacity = 0,
          .expert_of = nullptr,
          .probs = nullptr,
          .counts_kept = nullptr,
          .counters_RunN = workspace_part<int64_t>(workspace, layout.counters),
          .starts = workspace_part<int64_t>(workspace, layout.starts),
          .kept_starts = workspace_part<int64_t>(workspace, layout.kept_starts),
          .sorted = workspace_part<int32_t>(workspace, layout.sorted)};
}

void ExpertSort::check_experts() const {
  int64_t num_bad = 0;
#pragma omp parallel for reduction(+ : num_bad)
  for (int64_t i = 0; i < num_assignments; ++i) {
    num_bad += expert_of[i] < -1 || expert_of[i] >= spec->num_experts;
  }
  ensure(num_bad == 0, "route_map: {} expert indices are outside -1..{}", num_bad,
         spec->num_experts - 1);
}

void ExpertSort::count_runs() const {
#pragma omp parallel for schedule(static)
  for (int64_t run = 0; run < kNumRuns; ++run) {
    int64_t* counts = counters(run);
    std::fill_n(counts, num_local(), 0);
    for (int64_t i = run_begin(run); i < run_begin(run + 1); ++i) {
      const int64_t expert = local_expert(i);
      if (expert >= 0) ++counts[expert];
    }
  }
}

/// Turns counts into places: expert by expert, and within an expert run by run.
void ExpertSort::place_runs() const {
  int64_t place = 0;
  for (int64_t expert = 0; expert < num_local(); ++expert) {
    starts[expert] = place;
    for (int64_t run = 0; run < kNumRuns; ++run) {
      int64_t& counter = counters(run)[expert];
      const int64_t count = counter;
      counter = place;
      place += count;
    }
  }
  starts[num_local()] = place;
}

void ExpertSort::sort_runs() const {
#pragma omp parallel for schedule(static)
  for (int64_t run = 0; run < kNumRuns; ++run) {
    int64_t* places = counters(run);
    for (int64_t i = run_begin(run); i < run_begin(run + 1); ++i) {
      const int64_t expert = local_expert(i);
      if (expert >= 0) sorted[places[expert]++] = static_cast<int32_t>(i);
    }
  }
}

/// Moves what a capacity group keeps to the front of its assignments, by expert and in token order
/// as before.
void ExpertSort::select_kept(int32_t* first, int32_t* kept_end, int32_t* last) const {
  if (spec->drop_policy == DropPolicy::kPosition) {
    if (spec->capacity_group_size == 1) return;  // already in token order
    std::nth_element(first, kept_end, last);
  } else {
    const auto key = [&](int32_t i) {  // a NaN would break the strict order
      return std::isnan(probs[i]) ? -std::numeric_limits<float>::infinity() : probs[i];
    };
    std::nth_element(first, kept_end, last, [&](int32_t a, int32_t b) {
      return key(a) > key(b) || (key(a) == key(b) && a < b);
    });
  }
  std::sort(first, kept_end, [&](int32_t a, int32_t b) {
    return expert_of[a] < expert_of[b] || (expert_of[a] == expert_of[b] && a < b);
  });
}

/// Returns how many assignments the experts of a capacity group give up.
int64_t ExpertSort::limit_group(int64_t group) const {
  const int64_t begin = group * spec->capacity_group_size;
  const int64_t end = begin + spec->capacity_group_size;
  int32_t* first = sorted + starts[begin];
  int32_t* last = sorted + starts[end];
  const int64_t count = last - first;
  const int64_t kept = std::min(count, capacity);
  if (kept < count) select_kept(first, first + kept, last);
  int32_t* next = first;
  for (int64_t expert = begin; expert < end; ++expert) {
    int32_t* kept_first = next;
    next = std::partition_point(kept_first, first + kept,
                                [&](int32_t i) { return local_expert(i) <= expert; });
    kept_starts[expert] = kept_first - sorted;
    counts_kept[expert] = next - kept_first;
  }
  return count - kept;
}

void ExpertSort::check_limit() const {
  if (spec->rows_limit == 0) return;
  const int64_t size = spec->capacity_group_size;
  for (int64_t first = 0; first < num_local(); first += size) {
    const int64_t count = starts[first + size] - starts[first];
    ensure(count <= spec->rows_limit,
           "route_map: {} rows for experts {} to {}, which get at most {}", count,
           spec->first_local() + first, spec->first_local() + first + size - 1, spec->rows_limit);
  }
}

int64_t ExpertSort::run() const {
  check_experts();
  count_runs();
  place_runs();
  check_limit();
  sort_runs();
  int64_t dropped = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : dropped)
  for (int64_t group = 0; group < num_local() / spec->capacity_group_size; ++group) {
    dropped += limit_group(group);
  }
  return dropped;
}

}  // namespace tessera
