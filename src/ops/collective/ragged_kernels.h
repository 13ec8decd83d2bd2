#pragma once

#include <vector>

#include "comm/rows.h"
#include "core/device.h"
#include "ops/collective/collective_kernels.h"
#include "ops/collective/ragged_collective.h"

/// The kernels of ragged_collective.h in all back ends: communicators need counts of rows on the
/// host, and back ends differ in how these get there.
namespace tessera::collective {

/// The counts that input `idx` has.
using ReadCounts = std::vector<int64_t> (*)(const KernelArgs& args, size_t idx);

/// Zeros the rows of the output that no rank fills. The exchange leaves them alone, so it may be
/// under way. On a device an output with an extent comes at its bound, and nobody reads the rest.
inline void clear_rows_after(const KernelArgs& args, int64_t num_rows) {
  const Tensor& out = args.out(0);
  ensure(num_rows <= out.shape[0], "{} rows arrive in a value of shape {}", num_rows,
         out.shape.to_string());
  const bool at_bound = !args.extents.empty() && args.out_extent(0) != nullptr;
  const int64_t num_bytes = (out.shape[0] - num_rows) * row_bytes(out);
  if (num_bytes == 0 || at_bound) return;
  Device& device = out.device == nullptr ? host_device() : *out.device;
  device.zero(row_data(out, num_rows), num_bytes);
}

template <ReadCounts kRead>
Pending all_to_all_v(const Operator& op, const KernelArgs& args) {
  const std::vector<int64_t> send_rows = kRead(args, 1);
  const std::vector<int64_t> receive_rows = kRead(args, 2);
  clear_rows_after(args, sum_rows(receive_rows));
  return comm_of(op).all_to_all_v(args.in(0), args.out(0), send_rows, receive_rows);
}

template <ReadCounts kRead>
Pending all_gather_v(const Operator& op, const KernelArgs& args) {
  const std::vector<int64_t> counts = kRead(args, 1);
  clear_rows_after(args, sum_rows(counts));
  return comm_of(op).all_gather_v(args.in(0), args.out(0), counts);
}

template <ReadCounts kRead>
Pending reduce_scatter_v(const Operator& op, const KernelArgs& args) {
  const std::vector<int64_t> counts = kRead(args, 1);
  clear_rows_after(args, counts[static_cast<size_t>(comm_of(op).rank())]);
  return comm_of(op).reduce_scatter_v(args.in(0), args.out(0), counts);
}

template <ReadCounts kRead>
void add_ragged_kernels(KernelTable& table) {
  table["all_to_all_v"] = all_to_all_v<kRead>;
  table["all_gather_v"] = all_gather_v<kRead>;
  table["reduce_scatter_v"] = reduce_scatter_v<kRead>;
}

}  // namespace tessera::collective
