#include "ops/collective/collective_kernels.h"

#include "comm/rows.h"
#include "core/host_tensor.h"
#include "ops/collective/ragged_collective.h"

namespace tessera::collective {
namespace {

Device& device_of(const Tensor& tensor) {
  return tensor.device == nullptr ? host_device() : *tensor.device;
}

Pending all_gather(const Operator& op, const KernelArgs& args) {
  return comm_of(op).all_gather(args.in(0), args.out(0));
}

Pending reduce_scatter(const Operator& op, const KernelArgs& args) {
  return comm_of(op).reduce_scatter(args.in(0), args.out(0));
}

Pending all_reduce_constant(const Operator& op, const KernelArgs& args) {
  return comm_of(op).all_reduce(args.in(0), args.out(0));
}

Pending all_to_all(const Operator& op, const KernelArgs& args) {
  return comm_of(op).all_to_all(args.in(0), args.out(0));
}

/// Zeros the rows of the output that no rank fills. The exchange leaves them alone, so it may be
/// under way. On a device an output with an extent comes at its bound, and nobody reads the rest.
void clear_rows_after(const KernelArgs& args, int64_t num_rows) {
  const Tensor& out = args.out(0);
  ensure(num_rows <= out.shape[0], "{} rows arrive in a value of shape {}", num_rows,
         out.shape.to_string());
  const bool at_bound = !args.extents.empty() && args.out_extent(0) != nullptr;
  const int64_t num_bytes = (out.shape[0] - num_rows) * row_bytes(out);
  if (num_bytes > 0 && !at_bound) device_of(out).zero(row_data(out, num_rows), num_bytes);
}

HostTensor read_counts(const KernelArgs& args, size_t idx) {
  return {args.in(idx), HostTensor::Access::kRead};
}

Pending all_to_all_v(const Operator& op, const KernelArgs& args) {
  const HostTensor send_rows = read_counts(args, 1);
  const HostTensor receive_rows = read_counts(args, 2);
  clear_rows_after(args, sum_rows(receive_rows.get().span<int64_t>()));
  return comm_of(op).all_to_all_v(args.in(0), args.out(0), send_rows.get().span<int64_t>(),
                                  receive_rows.get().span<int64_t>());
}

Pending all_gather_v(const Operator& op, const KernelArgs& args) {
  const HostTensor host = read_counts(args, 1);
  const auto counts = host.get().span<int64_t>();
  clear_rows_after(args, sum_rows(counts));
  return comm_of(op).all_gather_v(args.in(0), args.out(0), counts);
}

Pending reduce_scatter_v(const Operator& op, const KernelArgs& args) {
  const HostTensor host = read_counts(args, 1);
  const auto counts = host.get().span<int64_t>();
  clear_rows_after(args, counts[static_cast<size_t>(comm_of(op).rank())]);
  return comm_of(op).reduce_scatter_v(args.in(0), args.out(0), counts);
}

}  // namespace

void add_kernels(KernelTable& table) {
  table["all_gather"] = all_gather;
  table["reduce_scatter"] = reduce_scatter;
  table["all_reduce_constant"] = all_reduce_constant;
  table["all_to_all"] = all_to_all;
  table["all_to_all_v"] = all_to_all_v;
  table["all_gather_v"] = all_gather_v;
  table["reduce_scatter_v"] = reduce_scatter_v;
}

}  // namespace tessera::collective
