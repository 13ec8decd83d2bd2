#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/slot_experts/slot_experts.h"
#include "ops/slot_experts/slot_experts_kernels.h"

namespace tessera {
namespace {

using namespace cuda;

void slot_experts(const Operator& op, const KernelArgs& args) {
  const SlotExpertsSpec& spec = static_cast<const SlotExperts&>(op).spec();
  launch_slot_experts({.num_slots = args.in(0).num_elements() / spec.num_experts,
                       .num_experts = static_cast<int>(spec.num_experts),
                       .slot_rows = spec.slot_rows,
                       .counts = args.in(0).as<int64_t>(),
                       .expert_of = args.out(0).as<int32_t>()},
                      stream_of(args));
  check(cudaGetLastError());
}

int64_t workspace_bytes(const Operator& op, std::span<const ValueType> /*inputs*/) {
  check_limit(op, static_cast<const SlotExperts&>(op).spec().num_experts, kSlotMaxExperts,
              "experts");
  return 0;
}

}  // namespace

void add_slot_experts_cuda(KernelTable& table) {
  table["slot_experts"] = Kernel(slot_experts, workspace_bytes);
}

}  // namespace tessera
