#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/sinkhorn/sinkhorn.h"
#include "ops/sinkhorn/sinkhorn_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

void sinkhorn(const Sinkhorn& op, const Args<Sinkhorn>& args) {
  const Tensor& logits = args.in(Sinkhorn::kLogits);
  const SinkhornWorkspace layout(logits.shape);
  cuda::launch_sinkhorn({.num_tokens = logits.shape[0],
                         .num_experts = static_cast<int>(logits.shape[1]),
                         .top_k = static_cast<int>(op.spec().top_k),
                         .first_own = op.spec().tokens.begin,
                         .own_tokens = op.spec().tokens.count,
                         .logits_TE = logits.as<float>(),
                         .noise = args.in(Sinkhorn::kNoise).as<int32_t>(),
                         .scores_TE = workspace_part<float>(args.workspace, layout.scores),
                         .factors_E = workspace_part<double>(args.workspace, layout.factors),
                         .partials = workspace_part<double>(args.workspace, layout.partials),
                         .done = workspace_part<int32_t>(args.workspace, layout.done),
                         .expert_idx = args.out(Sinkhorn::kExpertIdx).as<int32_t>()},
                        cuda::stream_of(args));
}

int64_t sinkhorn_workspace(const Sinkhorn& op, std::span<const ValueType> inputs) {
  const Shape& logits = inputs[Sinkhorn::kLogits].shape;
  cuda::check_limit(op, logits[1], cuda::kSinkhornMaxExperts, "experts");
  return SinkhornWorkspace(logits).num_bytes;
}

}  // namespace

void add_sinkhorn_cuda(KernelTable& table) {
  add_kernel<Sinkhorn>(table, sinkhorn, {.workspace = sinkhorn_workspace});
}

}  // namespace tessera
