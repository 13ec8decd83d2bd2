#include <algorithm>

#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/route_map/capacity_limit.h"
#include "ops/route_map/route_map.h"
#include "ops/route_map/route_map_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using namespace cuda;

/// Where the parts of a sort's scratch memory start, in bytes.
struct SortWorkspace {
  int64_t counts = 0;  ///< i32 [runs, N]
  int64_t starts = 0;  ///< i64 [N + 1]
  int64_t sorted = 0;  ///< i32 [T, K]

  SortWorkspace(int64_t num_assignments, int64_t num_local, WorkspaceLayout& layout)
      : counts(layout.add<int32_t>(num_local * route_runs(num_assignments))),
        starts(layout.add<int64_t>(num_local + 1)),
        sorted(layout.add<int32_t>(num_assignments)) {}
};

RouteAssignments assignments_of(const RouteMapSpec& spec, const int32_t* expert_of,
                                int64_t num_assignments) {
  return {.expert_of = expert_of,
          .bound = num_assignments,
          .num_tokens = nullptr,
          .top_k = static_cast<int>(spec.top_k),
          .num_experts = static_cast<int>(spec.num_experts),
          .first_local = static_cast<int>(spec.first_local()),
          .num_local = static_cast<int>(spec.num_local())};
}

/// The sorted assignments of a call, and what of them is kept.
struct Sort {
  const RouteMapSpec& spec;
  RouteAssignments assignments;
  int64_t capacity;
  const float* probs;
  int32_t* counts_RN;
  int64_t* starts;
  int32_t* sorted;
  int64_t* counts_kept;
  int32_t* row_of_TK;  ///< set to -1; null: not wanted
  cudaStream_t stream;

  /// Where nothing can be dropped: straight to the experts' rows.
  void run_dropless(const RouteOffsets& rows, int32_t* source_R) const {
    if (is_route_few(assignments.bound, assignments.num_local, rows.alignment)) {
      launch_route_few({assignments, source_R, row_of_TK, rows}, stream);
      return;
    }
    launch_route_count({assignments, counts_RN, row_of_TK}, stream);
    launch_route_places({.num_local = assignments.num_local,
                         .num_runs = route_runs(assignments.bound),
                         .counts_RN = counts_RN,
                         .starts = starts,
                         .source_R = source_R,
                         .rows = rows},
                        stream);
    launch_route_sort({assignments, counts_RN, rows.offsets, source_R, row_of_TK}, stream);
  }

  void run() const {
    launch_route_count({assignments, counts_RN, row_of_TK}, stream);
    launch_route_places({.num_local = assignments.num_local,
                         .num_runs = route_runs(assignments.bound),
                         .counts_RN = counts_RN,
                         .starts = starts,
                         .source_R = nullptr,
                         .rows = {}},
                        stream);
    launch_route_sort({assignments, counts_RN, starts, sorted, nullptr}, stream);
    launch_route_keep(
        {.num_groups = static_cast<int>(assignments.num_local / spec.capacity_group_size),
         .group_size = static_cast<int>(spec.capacity_group_size),
         .capacity = capacity,
         .rows_limit = spec.rows_limit,
         .by_probs = spec.drop_policy == DropPolicy::kProbs,
         .probs = probs,
         .starts = starts,
         .sorted = sorted,
         .counts_kept = counts_kept},
        stream);
  }
};

void route_map(const RouteMap& op, const Args<RouteMap>& args) {
  const RouteMapSpec& spec = op.spec();
  const int64_t num_assignments = args.in(RouteMap::kExpertIdx).num_elements();
  WorkspaceLayout layout;
  const SortWorkspace parts(num_assignments, spec.num_local(), layout);
  const Tensor& source = args.out(RouteMap::kSourceR);
  auto* row_of = args.out(RouteMap::kRowOfTK).as<int32_t>();
  auto* counts_kept = args.out(RouteMap::kCountsKept).as<int64_t>();
  auto* offsets = args.out(RouteMap::kOffsets).as<int64_t>();
  Sort sort{.spec = spec,
            .assignments =
                assignments_of(spec, args.in(RouteMap::kExpertIdx).as<int32_t>(), num_assignments),
            .capacity = op.capacity(args.in(RouteMap::kExpertIdx).shape[0]),
            .probs = std::ssize(args.inputs) > RouteMap::kProbs
                         ? args.in(RouteMap::kProbs).as<float>()
                         : nullptr,
            .counts_RN = workspace_part<int32_t>(args.workspace, parts.counts),
            .starts = workspace_part<int64_t>(args.workspace, parts.starts),
            .sorted = workspace_part<int32_t>(args.workspace, parts.sorted),
            .counts_kept = counts_kept,
            .row_of_TK = row_of,
            .stream = stream_of(args)};
  sort.assignments.num_tokens = args.in_extent(RouteMap::kExpertIdx);
  const RouteOffsets rows{.num_local = sort.assignments.num_local,
                          .alignment = spec.alignment,
                          .rows_each = spec.pad_to_capacity ? sort.capacity : 0,
                          .slot_experts = static_cast<int>(spec.slot_experts),
                          .slot_rows = spec.slot_rows,
                          .max_rows = source.shape[0],
                          .starts = sort.starts,
                          .counts_kept = counts_kept,
                          .offsets = offsets,
                          .extent = args.out(RouteMap::kExtent).as<int64_t>(),
                          .dropped = args.out(RouteMap::kDropped).as<int64_t>()};
  if (!spec.limits_rows() && !spec.has_slots()) {
    sort.run_dropless(rows, source.as<int32_t>());
    return;
  }
  sort.run();
  launch_route_offsets(rows, sort.stream);
  launch_route_rows({.num_local = sort.assignments.num_local,
                     .starts = sort.starts,
                     .counts_kept = counts_kept,
                     .offsets = offsets,
                     .sorted = sort.sorted,
                     .row_of_TK = row_of,
                     .source_R = source.as<int32_t>()},
                    sort.stream);
}

int64_t route_map_workspace(const RouteMap& op, std::span<const ValueType> inputs) {
  const RouteMapSpec& spec = op.spec();
  check_limit(op, spec.num_local(), kRouteMaxExperts, "experts");
  WorkspaceLayout layout;
  const SortWorkspace parts(inputs[RouteMap::kExpertIdx].shape.num_elements(), spec.num_local(),
                            layout);
  return layout.num_bytes();
}

/// Where the parts of CapacityLimit's scratch memory start, in bytes.
struct LimitWorkspace {
  WorkspaceLayout layout;
  SortWorkspace sort;
  int64_t counts_kept;  ///< i64 [E]
  int64_t expert_idx;   ///< i32 [T, K] in the micro-batch's order
  int64_t probs;        ///< f32 [T, K] in the micro-batch's order
  int64_t row_of;       ///< i32 [T]

  LimitWorkspace(const CapacityLimitSpec& spec, int64_t num_tokens)
      : sort(num_tokens * spec.route.top_k, spec.route.num_experts, layout),
        counts_kept(layout.add<int64_t>(spec.route.num_experts)),
        expert_idx(layout.add<int32_t>(spec.has_positions ? num_tokens * spec.route.top_k : 0)),
        probs(layout.add<float>(spec.has_positions ? num_tokens * spec.route.top_k : 0)),
        row_of(layout.add<int32_t>(spec.has_positions ? num_tokens : 0)) {}
};

void capacity_limit_cuda(const CapacityLimit& op, const Args<CapacityLimit>& args) {
  using Op = CapacityLimit;
  const CapacityLimitSpec& spec = op.spec();
  const int64_t num_tokens = args.in(Op::kExpertIdx).shape[0];
  const LimitWorkspace parts(spec, num_tokens);
  const auto* expert_idx = args.in(Op::kExpertIdx).as<int32_t>();
  const auto* probs = args.in(Op::kProbs).as<float>();
  int32_t* row_of = nullptr;
  const cudaStream_t stream = stream_of(args);
  if (spec.has_positions) {
    row_of = workspace_part<int32_t>(args.workspace, parts.row_of);
    auto* ordered_idx = workspace_part<int32_t>(args.workspace, parts.expert_idx);
    auto* ordered_probs = workspace_part<float>(args.workspace, parts.probs);
    launch_capacity_order({.num_tokens = num_tokens,
                           .top_k = static_cast<int>(spec.route.top_k),
                           .positions = args.in(Op::kPositions).as<int32_t>(),
                           .expert_idx_TK = expert_idx,
                           .probs_TK = probs,
                           .row_of_T = row_of,
                           .ordered_idx_TK = ordered_idx,
                           .ordered_probs_TK = ordered_probs},
                          stream);
    expert_idx = ordered_idx;
    probs = ordered_probs;
  }
  const Sort sort{
      .spec = spec.route,
      .assignments = assignments_of(spec.route, expert_idx, num_tokens * spec.route.top_k),
      .capacity = op.route().capacity(num_tokens),
      .probs = probs,
      .counts_RN = workspace_part<int32_t>(args.workspace, parts.sort.counts),
      .starts = workspace_part<int64_t>(args.workspace, parts.sort.starts),
      .sorted = workspace_part<int32_t>(args.workspace, parts.sort.sorted),
      .counts_kept = workspace_part<int64_t>(args.workspace, parts.counts_kept),
      .row_of_TK = nullptr,
      .stream = stream};
  sort.run();
  launch_capacity_own({.num_experts = sort.assignments.num_local,
                       .top_k = sort.assignments.top_k,
                       .begin = spec.tokens.begin,
                       .count = spec.tokens.count,
                       .expert_idx_TK = args.in(Op::kExpertIdx).as<int32_t>(),
                       .row_of_T = row_of,
                       .starts = sort.starts,
                       .counts_kept = sort.counts_kept,
                       .sorted = sort.sorted,
                       .own_idx = args.out(Op::kKept).as<int32_t>(),
                       .dropped = args.out(Op::kDropped).as<int64_t>()},
                      stream);
}

int64_t capacity_limit_workspace(const CapacityLimit& op, std::span<const ValueType> inputs) {
  const auto& spec = op.spec();
  check_limit(op, spec.route.num_local(), kRouteMaxExperts, "experts");
  return LimitWorkspace(spec, inputs[CapacityLimit::kExpertIdx].shape[0]).layout.num_bytes();
}

}  // namespace

void add_route_map_cuda(KernelTable& table) {
  add_kernel<RouteMap>(table, route_map, {.workspace = route_map_workspace});
  add_kernel<CapacityLimit>(table, capacity_limit_cuda, {.workspace = capacity_limit_workspace});
}

}  // namespace tessera
