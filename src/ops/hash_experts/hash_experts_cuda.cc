#include "ops/cuda/context.h"
#include "ops/hash_experts/hash_experts.h"
#include "ops/hash_experts/hash_experts_kernels.h"

namespace tessera {
namespace {

void hash_experts(const HashExperts& op, const Args<HashExperts>& args) {
  using Op = HashExperts;
  const Tensor& table = args.in(Op::kTable);
  cuda::launch_hash_experts({.num_tokens = args.in(Op::kTokens).num_elements(),
                             .vocab_size = table.shape[0],
                             .top_k = table.shape[1],
                             .num_experts = op.num_experts(),
                             .tokens = args.in(Op::kTokens).as<int32_t>(),
                             .table = table.as<float>(),
                             .expert_idx = args.out(Op::kExpertIdx).as<int32_t>()},
                            cuda::stream_of(args));
}

}  // namespace

void add_hash_experts_cuda(KernelTable& table) {
  add_kernel<HashExperts>(table, hash_experts);
}

}  // namespace tessera
