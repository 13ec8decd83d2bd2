#include <algorithm>

#include "ops/cuda/context.h"
#include "ops/round_values/round_values.h"
#include "ops/round_values/round_values_kernels.h"

namespace tessera {
namespace {

/// What the grid of a launch has along a dim.
constexpr int64_t kMostGroups = 65535;

int64_t num_groups_of(const RoundValuesSpec& spec, int64_t num_offsets) {
  if (spec.offsets) return num_offsets - 1;
  return spec.group_rows.empty() ? 1 : std::ssize(spec.group_rows);
}

int64_t workspace_bytes(const RoundValues& op, std::span<const ValueType> inputs) {
  const RoundValuesSpec& spec = op.spec();
  if (spec.cast.delayed) return 0;
  const Shape& shape = inputs[RoundValues::kX].shape;
  const int64_t num_groups =
      num_groups_of(spec, spec.offsets ? inputs[RoundValues::kOffsets].shape[0] : 0);
  check_shape(op, num_groups <= kMostGroups, "on a GPU there can be {} groups of rows, got {}",
              kMostGroups, num_groups);
  return cuda::round_scratch_words(spec.cast, spec.sum_dim, shape[0], shape[1], num_groups) *
         int64_t{sizeof(uint32_t)};
}

void round_delayed(const RoundValues& op, const Args<RoundValues>& args) {
  const RoundValuesSpec& spec = op.spec();
  const Tensor& x = args.in(RoundValues::kX);
  cuda::DelayedRows rows{
      .dtype = x.dtype,
      .number = spec.cast.number,
      .x = x.data,
      .y = args.out(RoundValues::kY).data,
      .num_columns = x.shape[1],
      .rows = {.bound = x.shape[0]},
      .offsets = nullptr,
      .num_groups = 0,
      .scales = args.in(RoundValues::kScales).as<float>(),
      .tally = nullptr,
      .places = {},
      .num_places = static_cast<int>(spec.places.size()),
      .overflows = spec.overflows,
  };
  if (const Tensor* offsets = args.find_in(RoundValues::kOffsets)) {
    rows.offsets = offsets->as<int64_t>();
    rows.num_groups = offsets->shape[0] - 1;
  } else {
    rows.rows.extent = args.in_extent(RoundValues::kX);
  }
  if (const Tensor* tally = args.find_out(RoundValues::kTally)) rows.tally = tally->as<int64_t>();
  std::ranges::copy(spec.places, rows.places);
  cuda::launch_round_delayed(rows, cuda::stream_of(args));
}

void round_values(const RoundValues& op, const Args<RoundValues>& args) {
  const RoundValuesSpec& spec = op.spec();
  if (spec.cast.delayed) return round_delayed(op, args);
  const Tensor& x = args.in(RoundValues::kX);
  const auto round = [&](const cuda::RowGroups& groups) {
    cuda::launch_round_values({.dtype = x.dtype,
                               .cast = spec.cast,
                               .sum_dim = spec.sum_dim,
                               .x = x.data,
                               .y = args.out(RoundValues::kY).data,
                               .num_rows = x.shape[0],
                               .num_columns = x.shape[1],
                               .groups = groups,
                               .scratch = reinterpret_cast<uint32_t*>(args.workspace.data())},
                              cuda::stream_of(args));
  };
  if (spec.offsets) {
    const Tensor& offsets = args.in(RoundValues::kOffsets);
    return round({.count = static_cast<int>(offsets.shape[0] - 1),
                  .offsets = offsets.as<int64_t>(),
                  .rows = {.bound = x.shape[0]}});
  }
  if (spec.group_rows.empty())
    return round({.rows = {.bound = x.shape[0], .extent = args.in_extent(RoundValues::kX)}});
  // Neighbours of one size together.
  const std::vector<int64_t>& sizes = spec.group_rows;
  int64_t first = 0;
  for (size_t begin = 0; begin < sizes.size();) {
    size_t end = begin;
    while (end < sizes.size() && sizes[end] == sizes[begin]) ++end;
    const auto count = static_cast<int>(end - begin);
    round({.count = count, .first = first, .rows = {.bound = sizes[begin]}});
    first += count * sizes[begin];
    begin = end;
  }
}

}  // namespace

void add_round_values_cuda(KernelTable& table) {
  add_kernel<RoundValues>(table, round_values, {.workspace = workspace_bytes});
}

}  // namespace tessera
