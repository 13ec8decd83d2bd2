#include "ops/cuda/context.h"
#include "ops/cuda/host_counts.h"
#include "ops/cuda/limits.h"
#include "ops/dispatch_plan/dispatch_plan.h"
#include "ops/dispatch_plan/dispatch_plan_kernels.h"

namespace tessera {
namespace {

using namespace cuda;

void dispatch_plan(const DispatchPlan& op, const Args<DispatchPlan>& args) {
  const DispatchPlanSpec& spec = op.spec();
  const auto out = [&](DispatchPlan::Output idx) { return args.out(idx).as<int64_t>(); };
  DispatchPlanning plan{.ep_size = static_cast<int>(spec.ep_size()),
                        .etp_size = static_cast<int>(spec.etp_size),
                        .ep_rank = static_cast<int>(spec.ep_rank),
                        .etp_rank = static_cast<int>(spec.etp_rank),
                        .max_received = spec.max_received,
                        .max_gathered = spec.max_gathered,
                        .counts = args.in(DispatchPlan::kCounts).as<int64_t>(),
                        .send_rows = out(DispatchPlan::kSendRows),
                        .receive_rows = out(DispatchPlan::kReceiveRows),
                        .received = out(DispatchPlan::kReceived),
                        .gather_rows = out(DispatchPlan::kGatherRows),
                        .gathered = out(DispatchPlan::kGathered),
                        .expert_idx = args.out(DispatchPlan::kExpertIdx).as<int32_t>(),
                        .run_starts = reinterpret_cast<int64_t*>(args.workspace.data()),
                        .first_experts = {}};
  for (size_t rank = 0; rank < spec.first_experts.size(); ++rank)
    plan.first_experts[rank] = static_cast<int32_t>(spec.first_experts[rank]);
  launch_dispatch_plan(plan, stream_of(args));
  if (!spec.tells_the_host) return;
  auto& counts = context_of(args).get<HostCounts>();
  for (const auto output :
       {DispatchPlan::kSendRows, DispatchPlan::kReceiveRows, DispatchPlan::kReceived,
        DispatchPlan::kGatherRows, DispatchPlan::kGathered})
    counts.keep(args.out(output));
}

int64_t workspace_bytes(const DispatchPlan& op, std::span<const ValueType> /*inputs*/) {
  const DispatchPlanSpec& spec = op.spec();
  check_limit(op, spec.ep_size(), kDispatchMaxRanks, "ranks of EP");
  return (spec.etp_size * spec.ep_size() * spec.num_local() + 1) * int64_t{sizeof(int64_t)};
}

}  // namespace

void add_dispatch_plan_cuda(KernelTable& table) {
  add_kernel<DispatchPlan>(table, dispatch_plan,
                           {.workspace = workspace_bytes, .tells_the_host = true});
  add_kernel<DispatchPlan>(table, DispatchPlan::kOnDevice, dispatch_plan,
                           {.workspace = workspace_bytes});
}

}  // namespace tessera
