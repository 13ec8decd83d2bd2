#include "ops/collective/collective_kernels.h"

namespace tessera::collective {
namespace {

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

}  // namespace

void add_kernels(KernelTable& table) {
  table["all_gather"] = all_gather;
  table["reduce_scatter"] = reduce_scatter;
  table["all_reduce_constant"] = all_reduce_constant;
  table["all_to_all"] = all_to_all;
}

}  // namespace tessera::collective
