#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/deal_tokens/deal_tokens.h"
#include "ops/deal_tokens/deal_tokens_kernels.h"

namespace tessera {
namespace {

/// A ring of one has all tokens in order.
void copy_on_gpu(const Tensor& from, const Tensor& to, cudaStream_t stream) {
  cuda::check(
      cudaMemcpyAsync(to.data, from.data, from.num_bytes(), cudaMemcpyDeviceToDevice, stream));
}

template <typename Op, auto kLaunch>
void move_tokens(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const Tensor& y = args.out(Op::kY);
  if (x.num_bytes() == 0) return;
  if (op.deal().ring == 1) return copy_on_gpu(x, y, cuda::stream_of(args));
  kLaunch({.num_rows = op.deal().num_rows,
           .row_length = op.deal().row_length,
           .ring = op.deal().ring,
           .token_bytes = x.num_bytes() / op.deal().num_tokens(),
           .from = x.data,
           .to = y.data},
          cuda::stream_of(args));
}

int64_t check_tokens(const TokenDeal& op, std::span<const ValueType> inputs) {
  cuda::check_limit(op, inputs[TokenDeal::kX].shape[0], INT32_MAX, "tokens");
  return 0;
}

}  // namespace

void add_deal_tokens_cuda(KernelTable& table) {
  add_kernel<DealTokens>(table, move_tokens<DealTokens, cuda::launch_deal_tokens>,
                         {.workspace = check_tokens});
  add_kernel<CollectTokens>(table, move_tokens<CollectTokens, cuda::launch_collect_tokens>,
                            {.workspace = check_tokens});
}

}  // namespace tessera
