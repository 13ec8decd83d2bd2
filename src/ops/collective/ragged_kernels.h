#pragma once

#include <vector>

#include "comm/rows.h"
#include "core/device.h"
#include "ops/collective/collective_kernels.h"
#include "ops/collective/ragged_collective.h"

/// The kernels of ragged_collective.h in all back ends: communicators need counts of rows on the
/// host, and back ends differ in how these get there.
namespace tessera::collective {

/// What such an input has.
using ReadCounts = std::vector<int64_t> (*)(const KernelArgs& args, const Tensor& counts);

inline void zero_rows_from(const Tensor& rows, int64_t first) {
  const int64_t num_bytes = (rows.shape[0] - first) * row_bytes(rows);
  if (num_bytes == 0) return;
  Device& device = rows.device == nullptr ? host_device() : *rows.device;
  device.zero(row_data(rows, first), num_bytes);
}

/// Zeros the rows of the output that no rank fills. The exchange leaves them alone, so it may be
/// under way. On a device an output with an extent comes at its bound, and nobody reads the rest.
template <typename Op>
void clear_rows_after(const Args<Op>& args, int64_t num_rows) {
  const Tensor& out = args.out(Op::kY);
  ensure(num_rows <= out.shape[0], "{} rows arrive in a value of shape {}", num_rows,
         out.shape.to_string());
  const bool at_bound = !args.extents.empty() && args.out_extent(Op::kY) != nullptr;
  if (at_bound) return;
  zero_rows_from(elements_of(out), num_rows);
  if (out.scale.is_scaled()) zero_rows_from(row_scales_of(out), num_rows);
}

template <ReadCounts kRead>
Pending all_to_all_v(const AllToAllV& op, const Args<AllToAllV>& args) {
  using Op = AllToAllV;
  const std::vector<int64_t> send_rows = kRead(args, args.in(Op::kSendRows));
  const std::vector<int64_t> receive_rows = kRead(args, args.in(Op::kReceiveRows));
  clear_rows_after(args, sum_rows(receive_rows));
  return op.comm().all_to_all_v(moves_of(args.in(Op::kX), args.out(Op::kY)), send_rows,
                                receive_rows);
}

template <ReadCounts kRead>
Pending all_gather_v(const AllGatherV& op, const Args<AllGatherV>& args) {
  const std::vector<int64_t> counts = kRead(args, args.in(AllGatherV::kCounts));
  clear_rows_after(args, sum_rows(counts));
  return op.comm().all_gather_v(moves_of(args.in(AllGatherV::kX), args.out(AllGatherV::kY)),
                                counts);
}

template <ReadCounts kRead>
Pending reduce_scatter_v(const ReduceScatterV& op, const Args<ReduceScatterV>& args) {
  using Op = ReduceScatterV;
  const std::vector<int64_t> counts = kRead(args, args.in(Op::kCounts));
  clear_rows_after(args, counts[op.comm().rank()]);
  return op.comm().reduce_scatter_v(args.in(Op::kX), args.out(Op::kY), counts);
}

template <ReadCounts kRead>
void add_ragged_kernels(KernelTable& table) {
  for (const std::string_view name : {AllToAllV::kName, AllToAllV::kOnDevice})
    add_kernel<AllToAllV>(table, name, all_to_all_v<kRead>, {.takes = takes_scaled_rows});
  add_kernel<AllGatherV>(table, all_gather_v<kRead>, {.takes = takes_scaled_rows});
  add_kernel<ReduceScatterV>(table, reduce_scatter_v<kRead>);
}

}  // namespace tessera::collective
