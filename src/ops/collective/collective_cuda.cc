#include "ops/collective/head_exchange.h"
#include "ops/collective/head_exchange_kernels.h"
#include "ops/collective/ragged_kernels.h"
#include "ops/cuda/context.h"
#include "ops/cuda/host_counts.h"

namespace tessera {
namespace {

using namespace cuda;

Tensor parts_in_workspace(const KernelArgs& args, const Tensor& x, const Shape& shape) {
  return {args.workspace.data(), x.dtype, shape, x.device};
}

Pending gather_heads(const GatherHeads& op, const Args<GatherHeads>& args) {
  Communicator& comm = op.comm();
  const Tensor& x = args.in(GatherHeads::kX);
  const Tensor& out = args.out(GatherHeads::kY);
  if (comm.size() == 1) return comm.all_to_all(x, out);
  const Tensor parts = parts_in_workspace(args, x, out.shape);
  launch_split_rows({comm.size(), x.shape[0], row_bytes(out)}, x.data, parts.data, stream_of(args));
  return comm.all_to_all(parts, out);
}

Pending scatter_heads(const ScatterHeads& op, const Args<ScatterHeads>& args) {
  using Op = ScatterHeads;
  Communicator& comm = op.comm();
  const Tensor& x = args.in(Op::kX);
  if (comm.size() == 1) return comm.all_to_all(x, args.out(Op::kY));
  const Tensor parts = parts_in_workspace(args, x, x.shape);
  const RowParts layout{comm.size(), args.out(Op::kY).shape[0], row_bytes(x)};
  const auto join = [=, out = args.out(Op::kY), stream = stream_of(args)] {
    launch_join_rows(layout, parts.data, out.data, stream);
  };
  return Pending(std::make_unique<collective::WorkThen>(comm.all_to_all(x, parts), join));
}

std::vector<int64_t> read_counts(const KernelArgs& args, const Tensor& counts) {
  return context_of(args).get<HostCounts>().read(counts);
}

Pending all_to_all_on_device(const AllToAllV& op, const Args<AllToAllV>& args) {
  using Op = AllToAllV;
  const bool at_bound = !args.extents.empty() && args.out_extent(Op::kY) != nullptr;
  // Who gives no extent wants the rest cleared, for which the host must know where it begins.
  if (!at_bound || !op.comm().takes_device_counts())
    return collective::all_to_all_v<read_counts>(op, args);
  return op.comm().all_to_all_v(collective::moves_of(args.in(Op::kX), args.out(Op::kY)),
                                args.in(Op::kSendRows), args.in(Op::kReceiveRows));
}

int64_t workspace_bytes(const HeadExchange& op, std::span<const ValueType> inputs) {
  return op.parts_bytes(inputs);
}

}  // namespace

void add_collective_cuda(KernelTable& table) {
  collective::add_kernels(table);
  collective::add_ragged_kernels<read_counts>(table);
  add_kernel<AllToAllV>(table, AllToAllV::kOnDevice, all_to_all_on_device,
                        {.takes = takes_scaled_rows});
  add_kernel<GatherHeads>(table, gather_heads, {.workspace = workspace_bytes});
  add_kernel<ScatterHeads>(table, scatter_heads, {.workspace = workspace_bytes});
}

}  // namespace tessera
