#include "ops/cuda/context.h"
#include "ops/sparse_mixer/sparse_mixer.h"
#include "ops/sparse_mixer/sparse_mixer_kernels.h"

namespace tessera {
namespace {

cuda::SparseMixerTokens describe(const SparseMixerSpec& spec, const Tensor& logits,
                                 const Tensor& idx) {
  return {.rule = {.num_experts = static_cast<int>(logits.shape[1]),
                   .top_k = static_cast<int>(idx.shape[1]),
                   .threshold = static_cast<float>(2 * spec.jitter)},
          .tokens = idx.shape[0],
          .logits = logits.as<float>(),
          .expert_idx = idx.as<int32_t>()};
}

void sparse_mixer(const SparseMixer& op, const Args<SparseMixer>& args) {
  using Op = SparseMixer;
  const auto tokens = describe(op.spec(), args.in(Op::kLogits), args.in(Op::kExpertIdx));
  auto* const probs = args.out(Op::kProbs).as<float>();
  if (!op.spec().samples) return cuda::launch_sparse_mixer(tokens, probs, cuda::stream_of(args));
  cuda::launch_sparse_mixer_draw(tokens,
                                 {.token_numbers = args.in(Op::kTokenNumbers).as<int64_t>(),
                                  .noise = args.in(Op::kNoise).as<int32_t>(),
                                  .probs = probs,
                                  .drawn_idx = args.out(Op::kDrawnIdx).as<int32_t>(),
                                  .counts_E = args.out(Op::kCounts).as<float>()},
                                 cuda::stream_of(args));
}

void sparse_mixer_backward(const SparseMixerBackward& op, const Args<SparseMixerBackward>& args) {
  using Op = SparseMixerBackward;
  cuda::launch_sparse_mixer_backward(
      describe(op.spec(), args.in(Op::kLogits), args.in(Op::kExpertIdx)),
      args.in(Op::kGrad).as<float>(), args.out(Op::kGradLogits).as<float>(), cuda::stream_of(args));
}

}  // namespace

void add_sparse_mixer_cuda(KernelTable& table) {
  add_kernel<SparseMixer>(table, sparse_mixer);
  add_kernel<SparseMixerBackward>(table, sparse_mixer_backward);
}

}  // namespace tessera
