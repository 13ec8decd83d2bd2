#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// The layout of routed rows on the GPU, in kernels that follow one another:
///   count the experts of each run of assignments -> place the runs, and the experts' rows ->
///   sort the assignments into these; where a capacity may drop some, sort them into scratch
///   memory, choose what each group keeps, place the experts' rows, and write the rows.
/// Of few assignments that are all kept, one kernel does everything.
namespace tessera::cuda {

constexpr int kRouteMaxExperts = 1024;
/// Assignments that a block counts and sorts: a *run*.
constexpr int kRouteRun = 1024;

constexpr int64_t route_runs(int64_t num_assignments) {
  return (num_assignments + kRouteRun - 1) / kRouteRun;
}

/// The assignments (t·K + k) to N local experts of E.
struct RouteAssignments {
  const int32_t* expert_of;
  int64_t bound;              ///< of the assignments
  const int64_t* num_tokens;  ///< in the GPU's memory, null: all `bound` are there
  int top_k;
  int num_experts;
  int first_local;
  int num_local;
};

struct RouteCount {
  RouteAssignments assignments;
  int32_t* counts_RN;  ///< [runs, N]
  int32_t* row_of_TK;  ///< set to -1; null: not wanted
};
void launch_route_count(const RouteCount& count, cudaStream_t stream);

/// The first row of every expert, from what each keeps.
struct RouteOffsets {
  int num_local;
  int64_t alignment;
  int64_t rows_each;  ///< of every expert, before alignment; 0: as many as it keeps
  int slot_experts;   ///< experts that share a slot of `slot_rows` rows; 0: no slots
  int64_t slot_rows;
  int64_t max_rows;
  const int64_t* starts;
  int64_t* counts_kept;
  int64_t* offsets;
  int64_t* extent;
  int64_t* dropped;
};
void launch_route_offsets(const RouteOffsets& offsets, cudaStream_t stream);

/// Turns counts into places: an expert's assignments follow the one's before, and within it runs
/// follow each other.
struct RoutePlaces {
  int num_local;
  int64_t num_runs;
  int32_t* counts_RN;  ///< result: where among the expert's own each run's begin
  int64_t* starts;     ///< [N + 1] result: where each expert's begin
  /// Not null: everything is kept. Then the experts' rows are placed too, as `rows` says, whose
  /// counts_kept is a result, and their padding is written here.
  int32_t* source_R;
  RouteOffsets rows;
};
void launch_route_places(const RoutePlaces& places, cudaStream_t stream);

/// Writes each local assignment to its place, in token order within its expert.
struct RouteSort {
  RouteAssignments assignments;
  const int32_t* places_RN;
  const int64_t* starts;
  int32_t* sorted;
  int32_t* place_of;  ///< result: where in `sorted` each assignment is; null: not wanted
};
void launch_route_sort(const RouteSort& sort, cudaStream_t stream);

/// What launch_route_few can lay out, and does sooner than kernels that follow one another.
constexpr int64_t kRouteFewAssignments = 8192;
constexpr int64_t kRouteFewExperts = 256;
constexpr int64_t kRouteFewAlignment = 65536;  ///< so that 32 bits hold the rows of all experts

constexpr bool is_route_few(int64_t num_assignments, int64_t num_local, int64_t alignment) {
  return num_assignments <= kRouteFewAssignments && num_local <= kRouteFewExperts &&
         alignment <= kRouteFewAlignment;
}

/// Everything, where nothing is dropped and there are no slots: both maps, padding included, and
/// what `rows` says, whose counts_kept is a result and whose starts are not read.
struct RouteFew {
  RouteAssignments assignments;
  int32_t* source_R;
  int32_t* row_of_TK;
  RouteOffsets rows;
};
void launch_route_few(const RouteFew& few, cudaStream_t stream);

/// Leaves of each capacity group of experts the best `capacity` assignments, or fails where it has
/// more than `rows_limit` (0: no limit). What an expert keeps stands, in order, at its start.
struct RouteKeep {
  int num_groups;
  int group_size;
  int64_t capacity;
  int64_t rows_limit;
  bool by_probs;  ///< keep the highest probabilities, of equal ones the first; else the first
  const float* probs;
  const int64_t* starts;
  int32_t* sorted;
  int64_t* counts_kept;  ///< [N]
};
void launch_route_keep(const RouteKeep& keep, cudaStream_t stream);

/// Both maps, from the sorted assignments.
struct RouteRows {
  int num_local;
  const int64_t* starts;
  const int64_t* counts_kept;
  const int64_t* offsets;
  const int32_t* sorted;
  int32_t* row_of_TK;
  int32_t* source_R;
};
void launch_route_rows(const RouteRows& rows, cudaStream_t stream);

/// Puts gathered assignments into the order of the micro-batch.
struct CapacityOrder {
  int64_t num_tokens;
  int top_k;
  const int32_t* positions;  ///< [T]
  const int32_t* expert_idx_TK;
  const float* probs_TK;
  int32_t* row_of_T;  ///< result: the input row of each token
  int32_t* ordered_idx_TK;
  float* ordered_probs_TK;
};
void launch_capacity_order(const CapacityOrder& order, cudaStream_t stream);

/// What is kept of this rank's tokens, the input rows [begin, begin + count).
struct CapacityOwn {
  int num_experts;
  int top_k;
  int64_t begin;
  int64_t count;
  const int32_t* expert_idx_TK;
  const int32_t* row_of_T;  ///< null: token t is row t
  const int64_t* starts;
  const int64_t* counts_kept;
  const int32_t* sorted;
  int32_t* own_idx;
  int64_t* dropped;
};
void launch_capacity_own(const CapacityOwn& own, cudaStream_t stream);

}  // namespace tessera::cuda
