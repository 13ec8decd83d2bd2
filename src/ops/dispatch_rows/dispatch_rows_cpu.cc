#include "ops/collective/ragged_kernels.h"
#include "ops/dispatch_rows/dispatch_rows.h"
#include "ops/permute/row_maps.h"

namespace tessera {
namespace {

using Op = DispatchRows;

std::vector<int64_t> counts_of(const Tensor& counts) {
  const auto values = counts.span<int64_t>();
  return {values.begin(), values.end()};
}

/// The rows are made, as a permutation makes them, and exchanged.
Pending dispatch_rows(const DispatchRows& op, const Args<DispatchRows>& args) {
  const Tensor& x = args.in(Op::kX);
  const Tensor& source = args.in(Op::kSource);
  const Tensor rows{args.workspace.data(), x.dtype, {source.shape[0], x.shape[1]}};
  gather_rows(x, source, top_k_of(args.in(Op::kRowOf).shape), rows);
  return op.comm().all_to_all_v(rows, args.out(Op::kY), counts_of(args.in(Op::kSendRows)),
                                counts_of(args.in(Op::kReceiveRows)));
}

int64_t workspace_bytes(const DispatchRows& /*op*/, std::span<const ValueType> inputs) {
  return DispatchRows::sent_rows(inputs).num_bytes();
}

}  // namespace

void add_dispatch_rows_cpu(KernelTable& table) {
  add_kernel<DispatchRows>(table, dispatch_rows, {.workspace = workspace_bytes});
}

}  // namespace tessera
