#include "ops/dispatch_rows/dispatch_rows.h"
#include "ops/permute/row_maps.h"

namespace tessera {
namespace {

using Op = DispatchRows;

Pending dispatch_rows(const DispatchRows& op, const Args<DispatchRows>& args) {
  return op.comm().all_to_all_v({.from = args.in(Op::kX),
                                 .source = args.in(Op::kSource),
                                 .choices = top_k_of(args.in(Op::kRowOf).shape),
                                 .to = args.out(Op::kY)},
                                args.in(Op::kSendRows), args.in(Op::kReceiveRows));
}

}  // namespace

void add_dispatch_rows_cuda(KernelTable& table) {
  add_kernel<DispatchRows>(table, dispatch_rows);
}

}  // namespace tessera
