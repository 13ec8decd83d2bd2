#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/slot_experts/slot_experts.h"
#include "ops/slot_experts/slot_experts_kernels.h"

namespace tessera {
namespace {

using namespace cuda;

void slot_experts(const SlotExperts& op, const Args<SlotExperts>& args) {
  using Op = SlotExperts;
  const SlotExpertsSpec& spec = op.spec();
  launch_slot_experts({.num_slots = args.in(Op::kCounts).num_elements() / spec.num_experts,
                       .num_experts = static_cast<int>(spec.num_experts),
                       .slot_rows = spec.slot_rows,
                       .counts = args.in(Op::kCounts).as<int64_t>(),
                       .expert_of = args.out(Op::kExpertIdx).as<int32_t>()},
                      stream_of(args));
}

int64_t workspace_bytes(const SlotExperts& op, std::span<const ValueType> /*inputs*/) {
  check_limit(op, op.spec().num_experts, kSlotMaxExperts, "experts");
  return 0;
}

}  // namespace

void add_slot_experts_cuda(KernelTable& table) {
  add_kernel<SlotExperts>(table, slot_experts, {.workspace = workspace_bytes});
}

}  // namespace tessera
