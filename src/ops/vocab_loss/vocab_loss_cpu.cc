#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/vocab_loss/vocab_loss.h"

namespace tessera {
namespace {

/// The statistics of a token over all parts.
struct TokenParts {
  const float* lse;
  const float* label_logit;
  int64_t num_parts;
  int64_t stride;  ///< from part to part

  /// log Σ exp(lse), as the maximum and the logarithm of the rest.
  struct Total {
    double maximum = -std::numeric_limits<double>::infinity();
    double log_sum = 0;
  };
  Total total() const {
    Total result;
    for (int64_t p = 0; p < num_parts; ++p)
      result.maximum = std::max(result.maximum, static_cast<double>(lse[p * stride]));
    double sum = 0;
    for (int64_t p = 0; p < num_parts; ++p) sum += std::exp(lse[p * stride] - result.maximum);
    result.log_sum = std::log(sum);
    return result;
  }
  double loss() const {
    const Total of_all = total();
    double logit = 0;
    for (int64_t p = 0; p < num_parts; ++p) logit += label_logit[p * stride];
    return of_all.maximum - logit + of_all.log_sum;
  }
};

template <typename Op>
TokenParts parts_of(const Args<Op>& args, int64_t num_parts, int64_t token) {
  return {args.in(Op::kLse).template as<float>() + token,
          args.in(Op::kLabelLogit).template as<float>() + token, num_parts,
          args.in(Op::kLabels).shape[0]};
}

/// A token's weight, 1 where each counts the same.
template <typename Op>
float weight_of(const Op& op, const Args<Op>& args, int64_t token) {
  return op.weighted() ? args.in(Op::kTokenWeights).template as<float>()[token] : 1.0F;
}

void vocab_loss(const VocabLoss& op, const Args<VocabLoss>& args) {
  const int64_t num_parts = op.num_parts();
  const auto labels = args.in(VocabLoss::kLabels).span<int32_t>();
  float* token_loss = args.out(VocabLoss::kTokenLoss).as<float>();
  double sum = 0;
  for (size_t t = 0; t < labels.size(); ++t) {
    const auto token = static_cast<int64_t>(t);
    token_loss[t] = labels[t] == kIgnoredLabel
                        ? 0.0F
                        : static_cast<float>(parts_of(args, num_parts, token).loss());
    sum += double{weight_of(op, args, token)} * token_loss[t];
  }
  *args.out(VocabLoss::kLoss).as<float>() =
      static_cast<float>(*args.in(VocabLoss::kScale).as<float>() * sum);
}

/// Writes a token's gradients for the loss's gradient `coef`.
void store_gradients(const TokenParts& parts, float coef, float* grad_lse,
                     float* grad_label_logit) {
  const TokenParts::Total total = parts.total();
  for (int64_t p = 0; p < parts.num_parts; ++p) {
    const int64_t at = p * parts.stride;
    const double share = std::exp(parts.lse[at] - total.maximum - total.log_sum);
    grad_lse[at] = static_cast<float>(coef * share);
    grad_label_logit[at] = -coef;
  }
}

void vocab_loss_backward(const VocabLossBackward& op, const Args<VocabLossBackward>& args) {
  using Op = VocabLossBackward;
  const int64_t num_parts = op.num_parts();
  const auto labels = args.in(Op::kLabels).span<int32_t>();
  const float coef = *args.in(Op::kScale).as<float>() * *args.in(Op::kGradLoss).as<float>();
  for (const auto output : {Op::kGradLse, Op::kGradLabelLogit})
    std::ranges::fill(args.out(output).span<float>(), 0.0F);
  for (int64_t token = 0; token < std::ssize(labels); ++token) {
    if (labels[token] == kIgnoredLabel) continue;
    store_gradients(parts_of(args, num_parts, token), coef * weight_of(op, args, token),
                    args.out(Op::kGradLse).as<float>() + token,
                    args.out(Op::kGradLabelLogit).as<float>() + token);
  }
}

}  // namespace

void add_vocab_loss_cpu(KernelTable& table) {
  add_kernel<VocabLoss>(table, vocab_loss);
  add_kernel<VocabLossBackward>(table, vocab_loss_backward);
}

}  // namespace tessera
