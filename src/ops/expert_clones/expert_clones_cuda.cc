#include "ops/cuda/context.h"
#include "ops/cuda/host_counts.h"
#include "ops/cuda/limits.h"
#include "ops/expert_clones/clone_exchange.h"
#include "ops/expert_clones/clone_plan_workspace.h"
#include "ops/expert_clones/expert_clones_kernels.h"

namespace tessera {
namespace {

using namespace cuda;

void clone_plan(const ClonePlan& op, const Args<ClonePlan>& args) {
  const CloneSlots& spec = op.slots();
  const ClonePlanWorkspace layout(spec);
  const auto scratch = [&](int64_t offset) {
    return workspace_part<int64_t>(args.workspace, offset);
  };
  launch_clone_plan({.counts = args.in(ClonePlan::kCounts).as<int64_t>(),
                     .num_experts = static_cast<int>(spec.num_experts),
                     .num_ranks = static_cast<int>(spec.num_ranks),
                     .rank = static_cast<int>(spec.rank),
                     .slots_per_rank = static_cast<int>(spec.slots_per_rank),
                     .slots = args.out(ClonePlan::kSlots).as<int64_t>(),
                     .begins = args.out(ClonePlan::kBegins).as<int64_t>(),
                     .ends = args.out(ClonePlan::kEnds).as<int64_t>(),
                     .rest = scratch(layout.rest),
                     .loads = scratch(layout.loads),
                     .filled = scratch(layout.filled),
                     .quotas = scratch(layout.quotas)},
                    stream_of(args));
  context_of(args).get<HostCounts>().keep(args.out(ClonePlan::kSlots));
}

int64_t clone_plan_workspace(const ClonePlan& op, std::span<const ValueType> /*inputs*/) {
  const CloneSlots& spec = op.slots();
  check_limit(op, spec.num_slots(), kCloneMaxSlots, "slots for clones");
  check_limit(op, spec.num_experts, kCloneMaxIndex, "experts");
  return ClonePlanWorkspace(spec).num_bytes;
}

void clone_route(const CloneRoute& op, const Args<CloneRoute>& args) {
  using Op = CloneRoute;
  launch_clone_route({.num_assignments = args.in(Op::kExpertIdx).num_elements(),
                      .expert_idx = args.in(Op::kExpertIdx).as<int32_t>(),
                      .row_of = args.in(Op::kRowOf).as<int32_t>(),
                      .offsets = args.in(Op::kOffsets).as<int64_t>(),
                      .num_slots = static_cast<int>(op.slots().num_slots()),
                      .slots = args.in(Op::kSlots).as<int64_t>(),
                      .begins = args.in(Op::kBegins).as<int64_t>(),
                      .ends = args.in(Op::kEnds).as<int64_t>(),
                      .home_idx = args.out(Op::kHomeIdx).as<int32_t>(),
                      .clone_idx = args.out(Op::kCloneIdx).as<int32_t>()},
                     stream_of(args));
}

int64_t clone_route_workspace(const CloneRoute& op, std::span<const ValueType> /*inputs*/) {
  check_limit(op, op.slots().num_slots(), kCloneMaxSlots, "slots for clones");
  return 0;
}

void add_clones(const AddClones& op, const Args<AddClones>& args) {
  const Tensor& sum = args.out(AddClones::kGradWeight);
  if (!sum) return;
  const CloneSlots& spec = op.slots();
  launch_add_clones({.returned = args.in(AddClones::kReturned).as<float>(),
                     .slots = args.in(AddClones::kSlots).as<int64_t>(),
                     .num_slots = static_cast<int>(spec.num_slots()),
                     .first_expert = spec.rank * spec.num_local(),
                     .num_local = spec.num_local(),
                     .block = sum.num_elements() / spec.num_local(),
                     .sum = sum.as<float>()},
                    stream_of(args));
}

std::vector<int64_t> read_slots(const KernelArgs& args, const Tensor& slots) {
  return context_of(args).get<HostCounts>().read(slots);
}

}  // namespace

void add_expert_clones_cuda(KernelTable& table) {
  add_kernel<ClonePlan>(table, clone_plan,
                        {.workspace = clone_plan_workspace, .tells_the_host = true});
  add_kernel<CloneRoute>(table, clone_route, {.workspace = clone_route_workspace});
  add_kernel<AddClones>(table, add_clones);
  clones::add_exchanges<read_slots>(table);
}

}  // namespace tessera
