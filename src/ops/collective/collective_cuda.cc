#include "ops/collective/head_exchange.h"
#include "ops/collective/head_exchange_kernels.h"
#include "ops/collective/ragged_kernels.h"
#include "ops/cuda/context.h"
#include "ops/cuda/host_counts.h"

namespace tessera {
namespace {

using namespace cuda;
using collective::comm_of;

Tensor parts_in_workspace(const KernelArgs& args, const Shape& shape) {
  const Tensor& x = args.in(0);
  return {args.workspace.data(), x.dtype, shape, x.device};
}

Pending gather_heads(const Operator& op, const KernelArgs& args) {
  Communicator& comm = comm_of(op);
  const Tensor& x = args.in(0);
  const Tensor& out = args.out(0);
  if (comm.size() == 1) return comm.all_to_all(x, out);
  const Tensor parts = parts_in_workspace(args, out.shape);
  launch_split_rows({comm.size(), x.shape[0], row_bytes(out)}, x.data, parts.data, stream_of(args));
  return comm.all_to_all(parts, out);
}

Pending scatter_heads(const Operator& op, const KernelArgs& args) {
  Communicator& comm = comm_of(op);
  const Tensor& x = args.in(0);
  if (comm.size() == 1) return comm.all_to_all(x, args.out(0));
  const Tensor parts = parts_in_workspace(args, x.shape);
  const RowParts layout{comm.size(), args.out(0).shape[0], row_bytes(x)};
  const auto join = [=, out = args.out(0), stream = stream_of(args)] {
    launch_join_rows(layout, parts.data, out.data, stream);
  };
  return Pending(std::make_unique<collective::WorkThen>(comm.all_to_all(x, parts), join));
}

std::vector<int64_t> read_counts(const KernelArgs& args, size_t idx) {
  return context_of(args).get<HostCounts>().read(args.in(idx));
}

/// The rows in the order of the ranks' parts.
int64_t workspace_bytes(const Operator& op, std::span<const ValueType> inputs) {
  return comm_of(op).size() == 1 ? 0 : inputs[0].num_bytes();
}

}  // namespace

void add_collective_cuda(KernelTable& table) {
  collective::add_kernels(table);
  collective::add_ragged_kernels<read_counts>(table);
  table["gather_heads"] = {gather_heads, workspace_bytes};
  table["scatter_heads"] = {scatter_heads, workspace_bytes};
}

}  // namespace tessera
