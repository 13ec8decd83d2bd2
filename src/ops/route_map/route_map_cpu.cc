#include <algorithm>

#include "ops/route_map/capacity_limit.h"
#include "ops/route_map/expert_sort.h"
#include "ops/route_map/route_map.h"

namespace tessera {
namespace {

/// The outputs that are written once it is known what each expert keeps.
struct Rows {
  const ExpertSort& sort;
  int32_t* row_of;
  int32_t* source_of;
  int64_t* offsets;
};

ExpertSort bind(const RouteMap& op, const Args<RouteMap>& args) {
  const Tensor& expert_idx = args.in(RouteMap::kExpertIdx);
  ExpertSort sort = ExpertSort::in_workspace(op.spec(), expert_idx.num_elements(), args.workspace);
  sort.capacity = op.capacity(expert_idx.shape[0]);
  sort.expert_of = expert_idx.as<int32_t>();
  const bool has_probs = std::ssize(args.inputs) > RouteMap::kProbs;
  sort.probs = has_probs ? args.in(RouteMap::kProbs).as<float>() : nullptr;
  sort.counts_kept = args.out(RouteMap::kCountsKept).as<int64_t>();
  return sort;
}

/// Where an expert begins (or all end) whose predecessors end at `row`.
int64_t enter_slot(const RouteMapSpec& spec, int64_t expert, int64_t row) {
  if (!spec.has_slots() || expert % spec.slot_experts != 0) return row;
  const int64_t begin = expert / spec.slot_experts * spec.slot_rows;
  ensure(row <= begin, "route_map: a slot of {} rows gets {} more", spec.slot_rows, row - begin);
  return begin;
}

/// Lays out the experts' rows; returns how many there are.
int64_t place_experts(const Rows& rows) {
  const ExpertSort& sort = rows.sort;
  int64_t row = 0;
  for (int64_t expert = 0; expert < sort.num_local(); ++expert) {
    row = enter_slot(*sort.spec, expert, row);
    rows.offsets[expert] = row;
    const int64_t kept = sort.counts_kept[expert];
    row += align_up(sort.spec->pad_to_capacity ? sort.capacity : kept, sort.spec->alignment);
  }
  row = enter_slot(*sort.spec, sort.num_local(), row);
  rows.offsets[sort.num_local()] = row;
  return row;
}

void write_expert(const Rows& rows, int64_t expert) {
  const int32_t* sorted = rows.sort.sorted + rows.sort.kept_starts[expert];
  const int64_t first = rows.offsets[expert];
  const int64_t kept = rows.sort.counts_kept[expert];
  for (int64_t i = 0; i < kept; ++i) {
    rows.source_of[first + i] = sorted[i];
    rows.row_of[sorted[i]] = static_cast<int32_t>(first + i);
  }
  std::fill(rows.source_of + first + kept, rows.source_of + rows.offsets[expert + 1], -1);
}

void route_map(const RouteMap& op, const Args<RouteMap>& args) {
  const ExpertSort sort = bind(op, args);
  const Tensor& source = args.out(RouteMap::kSourceR);
  const Rows rows{.sort = sort,
                  .row_of = args.out(RouteMap::kRowOfTK).as<int32_t>(),
                  .source_of = source.as<int32_t>(),
                  .offsets = args.out(RouteMap::kOffsets).as<int64_t>()};
  *args.out(RouteMap::kDropped).as<int64_t>() = sort.run();
  const int64_t num_rows = place_experts(rows);
  ensure(num_rows <= source.shape[0], "route_map: {} rows, at most {} were expected", num_rows,
         source.shape[0]);
  std::fill_n(rows.row_of, sort.num_assignments, -1);
#pragma omp parallel for schedule(dynamic)
  for (int64_t expert = 0; expert < sort.num_local(); ++expert) write_expert(rows, expert);
  *args.out(RouteMap::kExtent).as<int64_t>() = num_rows;
}

int64_t capacity_limit_workspace(const CapacityLimit& op, std::span<const ValueType> inputs) {
  return CapacityLimitWorkspace(op.spec().route, inputs[CapacityLimit::kExpertIdx].shape[0])
      .num_bytes;
}

int64_t route_map_workspace(const RouteMap& op, std::span<const ValueType> inputs) {
  return ExpertSortWorkspace(inputs[RouteMap::kExpertIdx].shape.num_elements(),
                             op.spec().num_local())
      .num_bytes;
}

}  // namespace

void add_route_map_cpu(KernelTable& table) {
  add_kernel<RouteMap>(table, route_map, {.workspace = route_map_workspace});
  add_kernel<CapacityLimit>(table, capacity_limit, {.workspace = capacity_limit_workspace});
}

}  // namespace tessera
