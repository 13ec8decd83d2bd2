#include "ops/collective/collective_kernels.h"

namespace tessera::collective {
namespace {

Pending all_gather(const AllGather& op, const Args<AllGather>& args) {
  return op.comm().all_gather(moves_of(args.in(AllGather::kX), args.out(AllGather::kY)));
}

Pending reduce_scatter(const ReduceScatter& op, const Args<ReduceScatter>& args) {
  return op.comm().reduce_scatter(args.in(ReduceScatter::kX), args.out(ReduceScatter::kY));
}

Pending all_reduce_constant(const AllReduceConstant& op, const Args<AllReduceConstant>& args) {
  return op.comm().all_reduce(args.in(AllReduceConstant::kX), args.out(AllReduceConstant::kY));
}

Pending all_to_all(const AllToAll& op, const Args<AllToAll>& args) {
  return op.comm().all_to_all(moves_of(args.in(AllToAll::kX), args.out(AllToAll::kY)));
}

}  // namespace

void add_kernels(KernelTable& table) {
  add_kernel<AllGather>(table, all_gather, {.takes = takes_scaled_rows});
  add_kernel<ReduceScatter>(table, reduce_scatter);
  add_kernel<AllReduceConstant>(table, all_reduce_constant);
  add_kernel<AllToAll>(table, all_to_all, {.takes = takes_scaled_rows});
}

}  // namespace tessera::collective
