#include "ops/choose_token/choose_token.h"
#include "ops/choose_token/choose_token_kernels.h"
#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"

namespace tessera {
namespace {

using Op = ChooseToken;

void choose_tokens(const ChooseToken& /*op*/, const Args<ChooseToken>& args) {
  const Tensor& logits = args.in(Op::kLogits);
  cuda::launch_choose_token({.dtype = logits.dtype,
                             .rows = logits.shape[0],
                             .vocab_size = static_cast<int>(logits.shape[1]),
                             .logits = logits.data,
                             .rules = reinterpret_cast<const TokenRule*>(args.in(Op::kRules).data),
                             .tokens = args.out(Op::kToken).as<int32_t>(),
                             .log_probabilities = args.out(Op::kLogProbability).as<double>()},
                            cuda::stream_of(args));
}

/// Sums of weights have 64 bits, and weights up to 2^40.
constexpr int64_t kMostTokens = int64_t{1} << 23;

int64_t choose_token_workspace(const ChooseToken& op, std::span<const ValueType> inputs) {
  cuda::check_limit(op, inputs[Op::kLogits].shape[1], kMostTokens, "tokens of a vocabulary");
  return 0;
}

}  // namespace

void add_choose_token_cuda(KernelTable& table) {
  add_kernel<ChooseToken>(table, choose_tokens, {.workspace = choose_token_workspace});
}

}  // namespace tessera
