#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/gemm/convert_rows.h"
#include "ops/gemm/row_products.h"
#include "ops/router/router_balance.h"
#include "ops/router/router_cpu.h"
#include "ops/router/router_scores.h"
#include "ops/router/router_workspace.h"
#include "ops/simd.h"

namespace tessera {
namespace {

/// One forward call: its sizes, tensors and scratch memory.
struct Forward {
  const RouterSpec& spec;
  RouterSizes sizes;
  const float* bias_E;         ///< null where there is none
  const int32_t* replayed_TK;  ///< likewise
  const int32_t* segments_T;   ///< likewise
  float* logits_TE;
  float* probs_TK;
  int32_t* expert_idx_TK;
  float* scratch;
  float* fractions;
  double* partials;

  bool is_padding(int64_t token) const { return segments_T != nullptr && segments_T[token] < 0; }
  float* scratch_row(int64_t block, int64_t row) const {
    return scratch + (block * kRouterScratchRows + row) * sizes.num_experts;
  }
};

/// The two weights of the logits, and what multiplies them.
struct LogitWeights {
  const float* weight_EH;
  const float* bias_E;  ///< null where there is none
  GemmFunction multiply;
};

/// logits[t] = W x[t] + b for some rows of F32 x.
void multiply_rows(const float* x, const LogitWeights& weights, float* logits, int64_t num_rows,
                   const RouterSizes& sizes) {
  weights.multiply({.transpose_b = true,
                    .m = num_rows,
                    .n = sizes.num_experts,
                    .k = sizes.hidden_size,
                    .a = x,
                    .lda = sizes.hidden_size,
                    .b = weights.weight_EH,
                    .ldb = sizes.hidden_size,
                    .c = logits,
                    .ldc = sizes.num_experts});
  if (weights.bias_E == nullptr) return;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    float* own = logits + row * sizes.num_experts;
    for (int64_t e = 0; e < sizes.num_experts; ++e) own[e] += weights.bias_E[e];
  }
}

/// Rows of BF16 x are widened kRouterProductRows at a time: of how many rows a product is decides
/// on its bits, so they are not cut over threads.
void compute_logits(const Tensor& x, const LogitWeights& weights, float* logits, float* widened,
                    const RouterSizes& sizes) {
  if (x.dtype == DType::kF32) {
    return multiply_rows(x.as<float>(), weights, logits, sizes.num_tokens, sizes);
  }
  for (int64_t first = 0; first < sizes.num_tokens; first += kRouterProductRows) {
    const int64_t num_rows = std::min(kRouterProductRows, sizes.num_tokens - first);
    widen_rows({x.as<Bf16>() + first * sizes.hidden_size, sizes.hidden_size},
               {widened, sizes.hidden_size}, num_rows, sizes.hidden_size);
    multiply_rows(widened, weights, logits + first * sizes.num_experts, num_rows, sizes);
  }
}

void force_balanced(const RouterSpec& spec, int64_t token, int32_t* expert_idx) {
  for (int64_t k = 0; k < spec.top_k; ++k) {
    expert_idx[k] = static_cast<int32_t>((token * spec.top_k + k) % spec.num_experts);
  }
}

/// Throws UserError for an expert that there is not.
void check_replayed(const Forward& f) {
  if (f.replayed_TK == nullptr) return;
  const int64_t num_experts = f.sizes.num_experts;
  for (int64_t t = 0; t < f.sizes.num_tokens; ++t) {
    const int32_t* given = f.replayed_TK + t * f.spec.top_k;
    for (int64_t k = 0; given[0] >= 0 && k < f.spec.top_k; ++k) {
      require(given[k] >= 0 && given[k] < num_experts,
              "router: token {} is to take expert {}, which is none of the {}", t, given[k],
              num_experts);
    }
  }
}

/// Whether the token's choice is given, which is copied then.
bool take_replayed(const Forward& f, int64_t token, int32_t* expert_idx) {
  if (f.replayed_TK == nullptr) return false;
  const int32_t* given = f.replayed_TK + token * f.spec.top_k;
  if (given[0] < 0) return false;
  std::copy_n(given, f.spec.top_k, expert_idx);
  return true;
}

/// Chooses a token's experts and probabilities; returns the log-sum-exp of its logits.
float route_token(const Forward& f, int64_t block, int64_t token) {
  const int64_t num_experts = f.sizes.num_experts;
  const float* logits = f.logits_TE + token * num_experts;
  int32_t* expert_idx = f.expert_idx_TK + token * f.spec.top_k;
  float* scores = f.scratch_row(block, 0);
  float* keys = f.scratch_row(block, 1);
  const float lse = softmax(logits, num_experts, scores);
  if (f.spec.score != ScoreFunction::kSoftmax)
    separate_scores(f.spec.score, logits, num_experts, scores);
  const float* compared = f.spec.order == ScoreOrder::kAfterTopK ? logits : scores;
  if (f.spec.force_balanced) {
    force_balanced(f.spec, token, expert_idx);
  } else if (!take_replayed(f, token, expert_idx)) {
    for (int64_t e = 0; e < num_experts; ++e) {
      keys[e] = compared[e] + (f.bias_E == nullptr ? 0.0F : f.bias_E[e]);
    }
    select_experts(f.spec, keys, f.scratch_row(block, 2),
                   reinterpret_cast<int32_t*>(f.scratch_row(block, 3)), expert_idx);
  }
  choose_probs(f.spec, compared, expert_idx, f.probs_TK + token * f.spec.top_k);
  return lse;
}

void leave_out(const Forward& f, int64_t token) {
  std::fill_n(f.expert_idx_TK + token * f.spec.top_k, f.spec.top_k, -1);
  std::fill_n(f.probs_TK + token * f.spec.top_k, f.spec.top_k, 0.0F);
}

void route_block(const Forward& f, int64_t block) {
  double sum = 0;
  for (int64_t t = block * kRouterBlock; t < block_end(f.sizes, block); ++t) {
    if (f.is_padding(t)) {
      leave_out(f, t);
      continue;
    }
    const double lse = route_token(f, block, t);
    sum += lse * lse;
  }
  f.partials[2 * block] = sum;
}

/// The block's parts of Σ_t Σ_e f_e · q_te and of Σ_t q_te, q being the scores made to sum to 1;
/// the latter is left in the block's second scratch row.
void balance_block(const Forward& f, const BalanceSegments& segments, int64_t block) {
  const int64_t num_experts = f.sizes.num_experts;
  float* shares = f.scratch_row(block, 0);
  float* sums = f.scratch_row(block, 1);
  std::fill_n(sums, num_experts, 0.0F);
  double sum = 0;
  for (int64_t t = block * kRouterBlock; t < block_end(f.sizes, block); ++t) {
    if (f.is_padding(t)) continue;
    balance_shares(f.spec.score, f.logits_TE + t * num_experts, num_experts, shares);
    const float* fractions = f.fractions + segments.of(t) * num_experts;
    for (int64_t e = 0; e < num_experts; ++e) {
      sum += static_cast<double>(fractions[e]) * static_cast<double>(shares[e]);
      sums[e] += shares[e];
    }
  }
  f.partials[2 * block + 1] = sum;
}

/// `scale` times the mean over tokens of what the blocks have summed.
float mean_of_partials(const Forward& f, int64_t which, double scale) {
  double sum = 0;
  for (int64_t block = 0; block < f.sizes.num_blocks(); ++block) {
    sum += f.partials[2 * block + which];
  }
  return static_cast<float>(scale * sum /
                            static_cast<double>(std::max<int64_t>(f.sizes.num_tokens, 1)));
}

/// The mean of every expert's share over the tokens, from the sums that balance_block left.
void write_score_means(const Forward& f, std::span<float> means_E) {
  const auto num_tokens = static_cast<double>(std::max<int64_t>(f.sizes.num_tokens, 1));
  for (size_t e = 0; e < means_E.size(); ++e) {
    double sum = 0;
    for (int64_t block = 0; block < f.sizes.num_blocks(); ++block) {
      sum += static_cast<double>(f.scratch_row(block, 1)[e]);
    }
    means_E[e] = static_cast<float>(sum / num_tokens);
  }
}

Forward bind(const Router& op, const Args<Router>& args, const RouterSizes& sizes) {
  const RouterWorkspace layout = RouterWorkspace::of_forward(sizes);
  const Tensor* bias = args.find_in(Router::kExpertBias);
  const Tensor* replayed = args.find_in(Router::kReplayed);
  const Tensor* segments = args.find_in(Router::kSegments);
  return {.spec = op.spec(),
          .sizes = sizes,
          .bias_E = bias == nullptr ? nullptr : bias->as<float>(),
          .replayed_TK = replayed == nullptr ? nullptr : replayed->as<int32_t>(),
          .segments_T = segments == nullptr ? nullptr : segments->as<int32_t>(),
          .logits_TE = args.out(Router::kLogits).as<float>(),
          .probs_TK = args.out(Router::kProbs).as<float>(),
          .expert_idx_TK = args.out(Router::kExpertIdx).as<int32_t>(),
          .scratch = workspace_part<float>(args.workspace, layout.scratch),
          .fractions = workspace_part<float>(args.workspace, layout.fractions),
          .partials = workspace_part<double>(args.workspace, layout.partials)};
}

template <GemmFunction kMultiply>
void router(const Router& op, const Args<Router>& args) {
  const Tensor& x = args.in(Router::kX);
  const BalanceSegments segments = balance_segments(args, x.shape[0]);
  const RouterSizes sizes{.num_tokens = x.shape[0],
                          .hidden_size = x.shape[1],
                          .num_experts = op.spec().num_experts,
                          .num_segments = segments.size()};
  const Forward f = bind(op, args, sizes);
  float* widened =
      workspace_part<float>(args.workspace, RouterWorkspace::of_forward(sizes).widened);
  const Tensor* bias = args.find_in(Router::kBias);
  compute_logits(x,
                 {args.in(Router::kWeight).as<float>(),
                  bias == nullptr ? nullptr : bias->as<float>(), kMultiply},
                 f.logits_TE, widened, sizes);
  check_replayed(f);
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < sizes.num_blocks(); ++block) route_block(f, block);

  const auto counts = args.out(Router::kCounts).span<float>();
  const auto expert_idx = args.out(Router::kExpertIdx).span<int32_t>();
  count_experts(expert_idx, counts);
  balance_fractions({segments, expert_idx, op.spec().top_k, counts, op.spec().balance_group_size},
                    {f.fractions, static_cast<size_t>(segments.size() * sizes.num_experts)});
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < sizes.num_blocks(); ++block) balance_block(f, segments, block);
  *args.out(Router::kZLoss).as<float>() = mean_of_partials(f, 0, 1.0);
  const int64_t num_compared = sizes.num_experts / op.spec().balance_group_size;
  *args.out(Router::kBalanceLoss).as<float>() =
      mean_of_partials(f, 1, static_cast<double>(num_compared));
  write_score_means(f, args.out(Router::kScoreMeans).span<float>());
}

int64_t router_workspace(const Router& op, std::span<const ValueType> inputs) {
  return RouterWorkspace::of_forward(router_sizes(op, inputs)).num_bytes;
}

int64_t router_backward_workspace(const RouterBackward& op, std::span<const ValueType> inputs) {
  return RouterWorkspace::of_backward(router_sizes(op, inputs)).num_bytes;
}

}  // namespace

TESSERA_CPU_KERNELS(add_router_cpu, table) {
  add_kernel<Router>(table, router<gemm>, {.workspace = router_workspace});
  add_kernel<RouterBackward>(table, router_backward, {.workspace = router_backward_workspace});
}

TESSERA_CPU_KERNELS(add_router_of_rows_cpu, table) {
  add_kernel<Router>(table, router<gemm_of_rows>, {.workspace = router_workspace});
}

}  // namespace tessera
