#pragma once

#include <cstdint>

#include "ops/route_map/route_map.h"
#include "ops/workspace.h"

namespace tessera {

/// Where the parts of the scratch memory of a sort start, in bytes.
struct ExpertSortWorkspace {
  int64_t counters = 0;     ///< i64 [kNumRuns, N]
  int64_t starts = 0;       ///< i64 [N + 1]
  int64_t kept_starts = 0;  ///< i64 [N]
  int64_t sorted = 0;       ///< i32 [T, K]
  int64_t num_bytes = 0;

  /// Assignments are counted in this many runs of tokens.
  static constexpr int64_t kNumRuns = 16;

  ExpertSortWorkspace(int64_t num_assignments, int64_t num_local);
};

/// The assignments (t·K + k) to the local experts, by expert and each expert's in token order, and
/// which of them its capacity lets it keep: the rule that RouteMap and CapacityLimit share.
struct ExpertSort {
  const RouteMapSpec* spec;
  int64_t num_assignments;
  int64_t capacity;  ///< rows that a capacity group keeps at most
  const int32_t* expert_of;
  const float* probs;  ///< null where none are needed

  int64_t* counts_kept;    ///< [N] result: how many an expert keeps
  int64_t* counters_RunN;  ///< assignments by run and expert, then their places in `sorted`
  int64_t* starts;         ///< [N + 1] the first place of each expert in `sorted`
  int64_t* kept_starts;    ///< [N] result: the first place of what an expert keeps
  int32_t* sorted;         ///< result: the kept ones of each capacity group stand first

  /// The memory of an operator's call; capacity, expert_of, probs and counts_kept are left to set.
  static ExpertSort in_workspace(const RouteMapSpec& spec, int64_t num_assignments,
                                 std::span<std::byte> workspace);

  int64_t num_local() const { return spec->num_local(); }
  /// The local index of an assignment's expert, -1 where it has none here.
  int64_t local_expert(int64_t assignment) const {
    const int64_t expert = expert_of[assignment] - spec->first_local();
    return expert >= 0 && expert < num_local() ? expert : -1;
  }

  /// Sorts, then chooses what is kept; returns how many are not. Throws InternalError for an index
  /// that is no expert's, and for more rows than the limit.
  int64_t run() const;

 private:
  int64_t run_begin(int64_t run) const {
    return num_assignments * run / ExpertSortWorkspace::kNumRuns;
  }
  int64_t* counters(int64_t run) const { return counters_RunN + run * num_local(); }
  void check_experts() const;
  void count_runs() const;
  void place_runs() const;
  void sort_runs() const;
  void check_limit() const;
  int64_t limit_group(int64_t group) const;
  void select_kept(int32_t* first, int32_t* kept_end, int32_t* last) const;
};

}  // namespace tessera
