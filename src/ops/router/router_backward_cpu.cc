#include <omp.h>

#include <algorithm>

#include "ops/gemm/gemm.h"
#include "ops/router/few_experts.h"
#include "ops/router/router_cpu.h"
#include "ops/router/router_scores.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// One backward call. The gradients that have not reached the router are null.
struct BackwardCall {
  const RouterSpec& spec;
  RouterSizes sizes;
  const float* logits_TE;
  const int32_t* expert_idx_TK;
  const float* grad_probs_TK = nullptr;
  const float* grad_balance = nullptr;
  const float* grad_z = nullptr;
  const float* grad_means_E = nullptr;
  const float* given_grad_logits_TE = nullptr;
  float* scratch;
  float* fractions;
  float* grad_logits_TE;

  float* scratch_row(int64_t block, int64_t row) const {
    return scratch + (block * kRouterScratchRows + row) * sizes.num_experts;
  }
};

/// dl += the softmax's gradient, given its result s and the gradient ds: s · (ds - Σ s·ds).
void add_softmax_gradient(const float* s, const float* ds, int64_t n, float* dl) {
  float dot = 0;
  for (int64_t i = 0; i < n; ++i) dot += s[i] * ds[i];
  for (int64_t i = 0; i < n; ++i) dl[i] += s[i] * (ds[i] - dot);
}

/// dl += the gradient of scores that are of one logit each.
void add_separate_gradient(ScoreFunction score, const float* s, const float* ds, int64_t n,
                           float* dl) {
  for (int64_t i = 0; i < n; ++i) dl[i] += s[i] * relative_slope(score, s[i]) * ds[i];
}

/// Softmax over the chosen logits alone: straight to the gradient of the logits.
void add_chosen_softmax_gradient(const BackwardCall& c, int64_t token, float* scratch, float* dl) {
  const int64_t top_k = c.spec.top_k;
  const int32_t* chosen = c.expert_idx_TK + token * top_k;
  const float* grad = c.grad_probs_TK + token * top_k;
  const float* logits = c.logits_TE + token * c.sizes.num_experts;
  for (int64_t k = 0; k < top_k; ++k) scratch[k] = logits[chosen[k]];
  softmax(scratch, top_k, scratch);
  float dot = 0;
  for (int64_t k = 0; k < top_k; ++k) dot += scratch[k] * grad[k];
  const auto scale = static_cast<float>(c.spec.scaling_factor);
  for (int64_t k = 0; k < top_k; ++k) dl[chosen[k]] += scale * scratch[k] * (grad[k] - dot);
}

/// Adds the gradient of the probabilities to that of the scores they were picked from.
void add_chosen_score_gradient(const BackwardCall& c, int64_t token, const float* scores,
                               float* ds) {
  const int64_t top_k = c.spec.top_k;
  const int32_t* chosen = c.expert_idx_TK + token * top_k;
  const float* grad = c.grad_probs_TK + token * top_k;
  float scale = static_cast<float>(c.spec.scaling_factor);
  float mean = 0;  // of the gradient, weighted by the normalised scores
  if (c.spec.normalize_top_k) {
    float sum = kScoreSumEpsilon;
    for (int64_t k = 0; k < top_k; ++k) sum += scores[chosen[k]];
    for (int64_t k = 0; k < top_k; ++k) mean += scores[chosen[k]] / sum * grad[k];
    scale /= sum;
  }
  for (int64_t k = 0; k < top_k; ++k) ds[chosen[k]] += scale * (grad[k] - mean);
}

/// Adds the gradient of scale/T · Σ_e w_e·q_e, q being a token's shares: its scores, but for
/// a softmax divided by their sum. The balance loss has w = f and scale = g·E (E counting groups,
/// where it compares those), the score means w = their gradient.
void add_share_gradient(const BackwardCall& c, const float* logits, const float* weights,
                        float scale, float* shares, float* ds) {
  const int64_t n = c.sizes.num_experts;
  scale /= static_cast<float>(c.sizes.num_tokens);
  const float sum = balance_shares(c.spec.score, logits, n, shares);
  float mean = 0;
  if (c.spec.score != ScoreFunction::kSoftmax) {
    for (int64_t e = 0; e < n; ++e) mean += shares[e] * weights[e];
  }
  for (int64_t e = 0; e < n; ++e) ds[e] += scale * (weights[e] - mean) / sum;
}

void add_z_gradient(const BackwardCall& c, const float* logits, float* scratch, float* dl) {
  const int64_t n = c.sizes.num_experts;
  const float lse = softmax(logits, n, scratch);
  const float scale = *c.grad_z * 2.0F * lse / static_cast<float>(c.sizes.num_tokens);
  for (int64_t e = 0; e < n; ++e) dl[e] += scale * scratch[e];
}

void backward_token(const BackwardCall& c, const BalanceSegments& segments, int64_t block,
                    int64_t token) {
  const int64_t n = c.sizes.num_experts;
  const float* logits = c.logits_TE + token * n;
  float* scores = c.scratch_row(block, 0);
  float* ds = c.scratch_row(block, 1);
  float* scratch = c.scratch_row(block, 2);
  float* dl = c.grad_logits_TE + token * n;
  if (c.given_grad_logits_TE == nullptr) {
    std::fill_n(dl, n, 0.0F);
  } else {
    std::copy_n(c.given_grad_logits_TE + token * n, n, dl);
  }
  if (c.expert_idx_TK[token * c.spec.top_k] < 0) return;  // it only fills the micro-batch
  std::fill_n(ds, n, 0.0F);
  const bool is_softmax = c.spec.score == ScoreFunction::kSoftmax;
  if (is_softmax) {
    softmax(logits, n, scores);
  } else {
    separate_scores(c.spec.score, logits, n, scores);
  }
  const bool after = c.spec.order == ScoreOrder::kAfterTopK;
  if (c.grad_probs_TK != nullptr && !after) add_chosen_score_gradient(c, token, scores, ds);
  if (c.grad_balance != nullptr) {
    const int64_t num_compared = n / c.spec.balance_group_size;
    const float scale = *c.grad_balance * static_cast<float>(num_compared);
    add_share_gradient(c, logits, c.fractions + segments.of(token) * n, scale, scratch, ds);
  }
  if (c.grad_means_E != nullptr) {
    add_share_gradient(c, logits, c.grad_means_E, 1.0F, scratch, ds);
  }
  if (is_softmax) {
    add_softmax_gradient(scores, ds, n, dl);
  } else {
    add_separate_gradient(c.spec.score, scores, ds, n, dl);
  }
  if (c.grad_probs_TK != nullptr && after) add_chosen_softmax_gradient(c, token, scratch, dl);
  if (c.grad_z != nullptr) add_z_gradient(c, logits, scratch, dl);
}

const float* floats(const Tensor* tensor) {
  return tensor == nullptr ? nullptr : tensor->as<float>();
}

/// dweight += dlogitsᵀ · x for some columns of x, by this thread. Rows of BF16 x are widened to
/// `room`, kRouterProductRows at a time.
void add_weight_gradient(const BackwardCall& c, const Tensor& x, int64_t col, int64_t num_cols,
                         float* room, float* grad_weight_EH) {
  const RouterSizes& s = c.sizes;
  const bool is_f32 = x.dtype == DType::kF32;
  const int64_t step = is_f32 ? s.num_tokens : kRouterProductRows;
  for (int64_t first = 0; first < s.num_tokens; first += step) {
    const int64_t num_rows = std::min(step, s.num_tokens - first);
    const int64_t at = first * s.hidden_size + col;
    if (!is_f32) {
      for (int64_t row = 0; row < num_rows; ++row) {
        simd::convert(room + row * num_cols, x.as<Bf16>() + at + row * s.hidden_size, num_cols);
      }
    }
    gemm({.transpose_a = true,
          .m = s.num_experts,
          .n = num_cols,
          .k = num_rows,
          .a = c.grad_logits_TE + first * s.num_experts,
          .lda = s.num_experts,
          .b = is_f32 ? x.as<float>() + at : room,
          .ldb = is_f32 ? s.hidden_size : num_cols,
          .c = grad_weight_EH + col,
          .ldc = s.hidden_size,
          .accumulate = true});
  }
}

/// Columns are shared out, so that sums have the same order with any number of threads.
void add_weight_gradients(const BackwardCall& c, const Tensor& x, float* widened,
                          float* grad_weight_EH) {
  constexpr int64_t kColumns = 32;
  const int64_t hidden = c.sizes.hidden_size;
  const int64_t rows = c.sizes.widened_rows();
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t col = 0; col < hidden; col += kColumns) {
    add_weight_gradient(c, x, col, std::min(kColumns, hidden - col), widened + col * rows,
                        grad_weight_EH);
  }
}

/// to = rows + what is to be added; they may be the same.
template <typename T>
void finish_rows(const float* rows, const T* others, int64_t count, T* to) {
  simd::for_each_vector(count, [&](int64_t i, auto lanes) {
    simd::Vec sum = simd::load(rows + i, lanes);
    if (others != nullptr) sum = simd::load(others + i, lanes) + sum;
    simd::store(to + i, sum, lanes);
  });
}

/// No more threads than there is room for blocks of widened rows.
int count_widening_threads(const RouterSizes& s) {
  const int64_t rooms = std::max<int64_t>(s.widened_rows() / kRouterBlock, 1);
  return static_cast<int>(std::min<int64_t>(omp_get_max_threads(), rooms));
}

/// dx = dlogits · weight + what is to be added, which may be null. Threads take blocks of tokens as
/// they become free.
void make_x_gradient(const BackwardCall& c, const float* weight_EH, const Tensor* addend,
                     float* widened, const Tensor& grad_x) {
  const RouterSizes& s = c.sizes;
  const bool is_f32 = grad_x.dtype == DType::kF32;
#pragma omp parallel for schedule(dynamic, 1) num_threads(count_widening_threads(s))
  for (int64_t block = 0; block < s.num_blocks(); ++block) {
    const int64_t first = block * kRouterBlock;
    const int64_t num_rows = block_end(s, block) - first;
    const int64_t at = first * s.hidden_size;
    float* rows = is_f32 ? grad_x.as<float>() + at
                         : widened + omp_get_thread_num() * kRouterBlock * s.hidden_size;
    gemm({.m = num_rows,
          .n = s.hidden_size,
          .k = s.num_experts,
          .a = c.grad_logits_TE + first * s.num_experts,
          .lda = s.num_experts,
          .b = weight_EH,
          .ldb = s.hidden_size,
          .c = rows,
          .ldc = s.hidden_size});
    if (is_f32 && addend == nullptr) continue;
    with_storage(grad_x.dtype, [&](auto storage) {
      using T = decltype(storage);
      finish_rows(rows, addend == nullptr ? nullptr : addend->as<T>() + at,
                  num_rows * s.hidden_size, grad_x.as<T>() + at);
    });
  }
}

/// The logits' gradients of all tokens, added up expert by expert.
void add_bias_gradient(const BackwardCall& call, float* grad_bias_E) {
  const RouterSizes& s = call.sizes;
#pragma omp parallel for schedule(static)
  for (int64_t e = 0; e < s.num_experts; ++e) {
    double sum = 0;
    for (int64_t t = 0; t < s.num_tokens; ++t)
      sum += static_cast<double>(call.grad_logits_TE[t * s.num_experts + e]);
    grad_bias_E[e] += static_cast<float>(sum);
  }
}

BackwardCall bind(const RouterBackward& op, const Args<RouterBackward>& args,
                  const RouterSizes& sizes) {
  using Op = RouterBackward;
  const RouterWorkspace layout = RouterWorkspace::of_backward(sizes);
  return {.spec = op.spec(),
          .sizes = sizes,
          .logits_TE = args.in(Op::kLogits).as<float>(),
          .expert_idx_TK = args.in(Op::kExpertIdx).as<int32_t>(),
          .grad_probs_TK = floats(args.find_in(Op::kGradProbs)),
          .grad_balance = floats(args.find_in(Op::kGradBalanceLoss)),
          .grad_z = floats(args.find_in(Op::kGradZLoss)),
          .grad_means_E = floats(args.find_in(Op::kGradScoreMeans)),
          .given_grad_logits_TE = floats(args.find_in(Op::kGradLogits)),
          .scratch = workspace_part<float>(args.workspace, layout.scratch),
          .fractions = workspace_part<float>(args.workspace, layout.fractions),
          .grad_logits_TE = workspace_part<float>(args.workspace, layout.grad_logits)};
}

void find_fractions(const BackwardCall& c, const Args<RouterBackward>& args,
                    const BalanceSegments& segments) {
  using Op = RouterBackward;
  if (c.grad_balance == nullptr) return;
  balance_fractions({segments, args.in(Op::kExpertIdx).span<int32_t>(), c.spec.top_k,
                     floats_of(args.find_in(Op::kCounts)), c.spec.balance_group_size},
                    {c.fractions, static_cast<size_t>(segments.size() * c.sizes.num_experts)});
}

void backward_block(const BackwardCall& c, const BalanceSegments& segments, int64_t block) {
  for (int64_t t = block * kRouterBlock; t < block_end(c.sizes, block); ++t)
    backward_token(c, segments, block, t);
}

/// What is wanted of a call besides the logits' gradients.
struct Wanted {
  const Tensor& x;
  const float* weight_EH;
  const Tensor* addend;   ///< or null
  const Tensor* grad_x;   ///< or null
  float* grad_weight_EH;  ///< or null
  float* room;            ///< for widened rows, or chunks' sums
};

/// Few experts: all gradients of one chunk of tokens, by this thread.
template <typename T>
void backward_chunk(const BackwardCall& c, const BalanceSegments& segments, const Wanted& wanted,
                    int64_t chunk) {
  const RouterSizes& s = c.sizes;
  float* sums = wanted.room + chunk * s.num_experts * s.hidden_size;
  if (wanted.grad_weight_EH != nullptr) std::fill_n(sums, s.num_experts * s.hidden_size, 0.0F);
  const int64_t begin = chunk * s.blocks_of_chunk();
  const int64_t end = std::min(begin + s.blocks_of_chunk(), s.num_blocks());
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kRouterBlock;
    const int64_t num_rows = block_end(s, block) - first;
    const float* grad_logits = c.grad_logits_TE + first * s.num_experts;
    const int64_t at = first * s.hidden_size;
    if (wanted.grad_weight_EH != nullptr)
      few_experts::prefetch(wanted.x.as<T>() + at, num_rows * s.hidden_size);
    backward_block(c, segments, block);
    if (wanted.grad_weight_EH != nullptr)
      few_experts::add_weight_gradient(grad_logits, wanted.x.as<T>() + at, num_rows, s, sums);
    if (wanted.grad_x != nullptr) {
      const T* addend = wanted.addend == nullptr ? nullptr : wanted.addend->as<T>() + at;
      if (addend != nullptr) few_experts::prefetch(addend, num_rows * s.hidden_size);
      few_experts::write_x_gradient(grad_logits, wanted.weight_EH, num_rows, s, addend,
                                    wanted.grad_x->as<T>() + at);
    }
  }
}

/// Chunks depend on the number of tokens alone, so sums have the same order with any number of
/// threads, which take chunks as they become free.
void backward_few(const BackwardCall& c, const BalanceSegments& segments, const Wanted& wanted) {
  const RouterSizes& s = c.sizes;
  if (s.num_tokens == 0) return;
  const int64_t num_chunks = (s.num_blocks() + s.blocks_of_chunk() - 1) / s.blocks_of_chunk();
  with_storage(wanted.x.dtype, [&](auto storage) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
      backward_chunk<decltype(storage)>(c, segments, wanted, chunk);
  });
  if (wanted.grad_weight_EH == nullptr) return;
  const int64_t count = s.num_experts * s.hidden_size;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i += simd::kLanes) {
    simd::for_each_vector(std::min<int64_t>(simd::kLanes, count - i), [&](int64_t, auto lanes) {
      simd::Vec total = simd::load(wanted.room + i, lanes);
      for (int64_t chunk = 1; chunk < num_chunks; ++chunk)
        total += simd::load(wanted.room + chunk * count + i, lanes);
      float* to = wanted.grad_weight_EH + i;
      simd::store(to, simd::load(to, lanes) + total, lanes);
    });
  }
}

void backward_many(const BackwardCall& c, const BalanceSegments& segments, const Wanted& wanted) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t block = 0; block < c.sizes.num_blocks(); ++block) backward_block(c, segments, block);
  if (wanted.grad_weight_EH != nullptr)
    add_weight_gradients(c, wanted.x, wanted.room, wanted.grad_weight_EH);
  if (wanted.grad_x != nullptr)
    make_x_gradient(c, wanted.weight_EH, wanted.addend, wanted.room, *wanted.grad_x);
}

}  // namespace

inline namespace TESSERA_CPU_LEVEL {

void router_backward(const RouterBackward& op, const Args<RouterBackward>& args) {
  using Op = RouterBackward;
  const Tensor& x = args.in(Op::kX);
  const BalanceSegments segments = balance_segments(args, x.shape[0]);
  const RouterSizes sizes{.num_tokens = x.shape[0],
                          .hidden_size = x.shape[1],
                          .num_experts = op.spec().num_experts,
                          .num_segments = segments.size()};
  const BackwardCall call = bind(op, args, sizes);
  find_fractions(call, args, segments);
  const Tensor* grad_weight = args.find_out(Op::kGradWeight);
  const bool takes_weight = grad_weight != nullptr && *grad_weight;
  const Wanted wanted{
      .x = x,
      .weight_EH = args.in(Op::kWeight).as<float>(),
      .addend = args.find_in(Op::kAddend),
      .grad_x = args.find_out(Op::kGradX),
      .grad_weight_EH = takes_weight ? grad_weight->as<float>() : nullptr,
      .room = workspace_part<float>(args.workspace, RouterWorkspace::of_backward(sizes).widened)};
  (sizes.has_few_experts() ? backward_few : backward_many)(call, segments, wanted);
  const Tensor* grad_bias = args.find_out(Op::kGradBias);
  if (grad_bias != nullptr && *grad_bias) add_bias_gradient(call, grad_bias->as<float>());
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
