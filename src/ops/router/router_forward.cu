// Scores, choice and probabilities: a warp to a token, and each block's statistics.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/router/router_block.cuh"
#include "ops/router/router_kernels.h"
#include "ops/router/router_totals.cuh"

namespace tessera::cuda {
namespace {

/// kFew: the last block adds the totals up.
template <int kPer, bool kPlain, bool kFew>
__global__ void __launch_bounds__(kWarpsOf<kPer>* kLanes) route_tokens(const RouterTokens p) {
  wait_for_earlier();
  if constexpr (kFew) let_next_begin();  // all blocks run at once
  __shared__ __align__(16) BlockScratch<kPer> block;
  route_block<kPer, kPlain>(p, blockIdx.x, block);
  if constexpr (kFew) {
    static_assert(kWarpsOf<kPer> == kRouterTotalParts);
    if (is_last_block(p.totals_counter)) add_few_totals(p.totals);
  }
}

}  // namespace

void launch_route_tokens(const RouterTokens& tokens, cudaStream_t stream) {
  if (tokens.num_tokens == 0) return;
  const RouterRule& rule = tokens.rule;
  const bool plain = is_plain(tokens);
  const auto blocks = static_cast<unsigned>(router_blocks(tokens.num_tokens));
  with_experts_per_lane(rule.num_experts, [&]<int kPer>() {
    const auto launch = [&](auto kernel) {
      launch_early(kernel, {blocks, kWarpsOf<kPer> * kLanes}, stream, tokens);
    };
    if constexpr (kPer == 1) {
      if (is_router_few(tokens.num_tokens, rule.num_experts))
        return launch(plain ? route_tokens<1, true, true> : route_tokens<1, false, true>);
    }
    launch(plain ? route_tokens<kPer, true, false> : route_tokens<kPer, false, false>);
  });
}

}  // namespace tessera::cuda
