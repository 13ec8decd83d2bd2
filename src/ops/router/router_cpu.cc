#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/gemm/convert_rows.h"
#include "ops/gemm/row_products.h"
#include "ops/router/few_experts.h"
#include "ops/router/router_balance.h"
#include "ops/router/router_cpu.h"
#include "ops/router/router_scores.h"
#include "ops/router/router_workspace.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Rows of a block's scratch memory. The first ones are of the token in hand, the last two sums
/// over the block: of shares, and of assignments.
enum ScratchRow : uint8_t { kScores, kKeys, kGroupKeys, kGroups, kShareSums, kAssigned };
static_assert(kAssigned + 1 == kRouterScratchRows);

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

void add_bias(const float* bias_E, int64_t num_experts, int64_t num_rows, float* logits) {
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t e = 0; e < num_experts; ++e) logits[row * num_experts + e] += bias_E[e];
  }
}

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
  for (int64_t row = 0; row < num_rows; ++row)
    add_bias(weights.bias_E, sizes.num_experts, 1, logits + row * sizes.num_experts);
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

/// Chooses a token's experts and probabilities, and leaves the scores of all in the block's scratch
/// memory; returns the log-sum-exp of its logits.
float route_token(const Forward& f, int64_t block, int64_t token) {
  const int64_t num_experts = f.sizes.num_experts;
  const float* logits = f.logits_TE + token * num_experts;
  int32_t* expert_idx = f.expert_idx_TK + token * f.spec.top_k;
  float* scores = f.scratch_row(block, kScores);
  float* keys = f.scratch_row(block, kKeys);
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
    select_experts(f.spec, keys, f.scratch_row(block, kGroupKeys),
                   reinterpret_cast<int32_t*>(f.scratch_row(block, kGroups)), expert_idx);
  }
  choose_probs(f.spec, compared, expert_idx, f.probs_TK + token * f.spec.top_k);
  return lse;
}

void leave_out(const Forward& f, int64_t token) {
  std::fill_n(f.expert_idx_TK + token * f.spec.top_k, f.spec.top_k, -1);
  std::fill_n(f.probs_TK + token * f.spec.top_k, f.spec.top_k, 0.0F);
}

/// Adds the token's scores, made to sum to 1, and its choice to the block's sums.
void count_token(const Forward& f, int64_t block, int64_t token) {
  float* shares = f.scratch_row(block, kScores);
  if (f.spec.score != ScoreFunction::kSoftmax) scores_to_shares(shares, f.sizes.num_experts);
  float* sums = f.scratch_row(block, kShareSums);
  for (int64_t e = 0; e < f.sizes.num_experts; ++e) sums[e] += shares[e];
  float* assigned = f.scratch_row(block, kAssigned);
  const int32_t* chosen = f.expert_idx_TK + token * f.spec.top_k;
  for (int64_t k = 0; k < f.spec.top_k; ++k) assigned[chosen[k]] += 1.0F;
}

void route_block(const Forward& f, int64_t block) {
  std::fill_n(f.scratch_row(block, kShareSums), f.sizes.num_experts, 0.0F);
  std::fill_n(f.scratch_row(block, kAssigned), f.sizes.num_experts, 0.0F);
  double sum = 0;
  for (int64_t t = block * kRouterBlock; t < block_end(f.sizes, block); ++t) {
    if (f.is_padding(t)) {
      leave_out(f, t);
      continue;
    }
    const double lse = route_token(f, block, t);
    sum += lse * lse;
    count_token(f, block, t);
  }
  f.partials[2 * block] = sum;
}

/// Of few experts, the block's logits first.
template <typename T>
void route_few_block(const Forward& f, const T* x, const LogitWeights& weights, int64_t block) {
  const int64_t first = block * kRouterBlock;
  const int64_t num_rows = block_end(f.sizes, block) - first;
  float* logits = f.logits_TE + first * f.sizes.num_experts;
  few_experts::prefetch(x + first * f.sizes.hidden_size, num_rows * f.sizes.hidden_size);
  few_experts::multiply_logits(x + first * f.sizes.hidden_size, weights.weight_EH, num_rows,
                               f.sizes, logits);
  if (weights.bias_E != nullptr) add_bias(weights.bias_E, f.sizes.num_experts, num_rows, logits);
  route_block(f, block);
}

/// The sum over all blocks of an expert's place in a row of scratch memory.
double sum_of_blocks(const Forward& f, ScratchRow row, int64_t expert) {
  double sum = 0;
  for (int64_t block = 0; block < f.sizes.num_blocks(); ++block)
    sum += static_cast<double>(f.scratch_row(block, row)[expert]);
  return sum;
}

double per_token(const Forward& f, double sum) {
  return sum / static_cast<double>(std::max<int64_t>(f.sizes.num_tokens, 1));
}

void write_counts(const Forward& f, std::span<float> counts_E) {
  for (size_t e = 0; e < counts_E.size(); ++e)
    counts_E[e] = static_cast<float>(sum_of_blocks(f, kAssigned, static_cast<int64_t>(e)));
}

/// The mean of every expert's share over the tokens; returns Σ_e f_e · P_e where all tokens are one
/// segment.
double write_score_means(const Forward& f, std::span<float> means_E) {
  double balance = 0;
  for (size_t e = 0; e < means_E.size(); ++e) {
    const double mean = per_token(f, sum_of_blocks(f, kShareSums, static_cast<int64_t>(e)));
    means_E[e] = static_cast<float>(mean);
    balance += static_cast<double>(f.fractions[e]) * mean;
  }
  return balance;
}

/// The block's part of Σ_t Σ_e f_e · q_te, q being the scores made to sum to 1.
void balance_block(const Forward& f, const BalanceSegments& segments, int64_t block) {
  const int64_t num_experts = f.sizes.num_experts;
  float* shares = f.scratch_row(block, kScores);
  double sum = 0;
  for (int64_t t = block * kRouterBlock; t < block_end(f.sizes, block); ++t) {
    if (f.is_padding(t)) continue;
    balance_shares(f.spec.score, f.logits_TE + t * num_experts, num_experts, shares);
    const float* fractions = f.fractions + segments.of(t) * num_experts;
    for (int64_t e = 0; e < num_experts; ++e)
      sum += static_cast<double>(fractions[e]) * static_cast<double>(shares[e]);
  }
  f.partials[2 * block + 1] = sum;
}

/// The mean over tokens of what the blocks have summed.
double mean_of_partials(const Forward& f, int64_t which) {
  double sum = 0;
  for (int64_t block = 0; block < f.sizes.num_blocks(); ++block)
    sum += f.partials[2 * block + which];
  return per_token(f, sum);
}

/// Σ f · P of several segments, token by token.
double balance_of_segments(const Forward& f, const BalanceSegments& segments) {
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < f.sizes.num_blocks(); ++block) balance_block(f, segments, block);
  return mean_of_partials(f, 1);
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

/// Logits, choices and the blocks' sums.
void route(const Forward& f, const Tensor& x, const LogitWeights& weights, float* widened) {
  check_replayed(f);
  if (!f.sizes.has_few_experts()) {
    compute_logits(x, weights, f.logits_TE, widened, f.sizes);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < f.sizes.num_blocks(); ++block) route_block(f, block);
    return;
  }
  with_storage(x.dtype, [&](auto storage) {
    const auto* rows = x.as<decltype(storage)>();
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < f.sizes.num_blocks(); ++block)
      route_few_block(f, rows, weights, block);
  });
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
  const Tensor* bias = args.find_in(Router::kBias);
  route(f, x,
        {args.in(Router::kWeight).as<float>(), bias == nullptr ? nullptr : bias->as<float>(),
         kMultiply},
        workspace_part<float>(args.workspace, RouterWorkspace::of_forward(sizes).widened));

  const auto counts = args.out(Router::kCounts).span<float>();
  write_counts(f, counts);
  balance_fractions({segments, args.out(Router::kExpertIdx).span<int32_t>(), op.spec().top_k,
                     counts, op.spec().balance_group_size},
                    {f.fractions, static_cast<size_t>(segments.size() * sizes.num_experts)});
  *args.out(Router::kZLoss).as<float>() = static_cast<float>(mean_of_partials(f, 0));
  const double of_one = write_score_means(f, args.out(Router::kScoreMeans).span<float>());
  const double balance = segments.size() == 1 ? of_one : balance_of_segments(f, segments);
  const int64_t num_compared = sizes.num_experts / op.spec().balance_group_size;
  *args.out(Router::kBalanceLoss).as<float>() =
      static_cast<float>(static_cast<double>(num_compared) * balance);
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
