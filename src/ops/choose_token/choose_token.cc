#include "ops/choose_token/choose_token.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/storage.h"

namespace tessera {
namespace {

/// Ids that may be chosen by falling probability, as many as top_k leaves.
std::span<int32_t> rank_tokens(std::span<const double> log_probabilities, int64_t vocab_size,
                               int64_t top_k, std::span<int32_t> ids) {
  const auto all = std::ssize(log_probabilities);
  const int64_t count = vocab_size > 0 ? std::min(vocab_size, all) : all;
  const int64_t kept = top_k > 0 ? std::min(top_k, count) : count;
  const std::span<int32_t> candidates = ids.first(count);
  std::iota(candidates.begin(), candidates.end(), 0);
  std::partial_sort(candidates.begin(), candidates.begin() + kept, candidates.end(),
                    [&](int32_t a, int32_t b) {
                      const double pa = log_probabilities[a];
                      const double pb = log_probabilities[b];
                      return pa != pb ? pa > pb : a < b;
                    });
  return candidates.first(kept);
}

/// Weights of the ranked tokens after temperature, cut where they reach top_p.
std::span<double> weigh_tokens(std::span<const double> log_probabilities,
                               std::span<const int32_t> ids, const TokenRule& rule,
                               std::span<double> weights) {
  const double best = log_probabilities[ids.front()];
  std::ranges::transform(ids, weights.begin(), [&](int32_t id) {
    return std::exp((log_probabilities[id] - best) / rule.temperature);
  });
  const std::span<double> all = weights.first(ids.size());
  const double goal = rule.top_p * std::accumulate(all.begin(), all.end(), 0.0);
  double reached = 0;
  size_t kept = 0;
  while (kept < all.size() && (kept == 0 || reached < goal)) reached += all[kept++];
  return all.first(kept);
}

}  // namespace

std::vector<ValueType> ChooseToken::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes logits and rules, got {} inputs", inputs.size());
  const ValueType& logits = inputs[kLogits];
  check_shape(*this,
              is_storage(logits.dtype) && logits.shape.rank() == 2 && !logits.ragged() &&
                  logits.shape[1] > 0,
              "logits must be f32 or bf16 [R, V], got {}", logits.to_string());
  const ValueType expected{DType::kU8, {logits.shape[0], int64_t{sizeof(TokenRule)}}};
  check_shape(*this, inputs[kRules] == expected, "rules must be {}, got {}", expected.to_string(),
              inputs[kRules].to_string());
  const Shape rows = {logits.shape[0]};
  return {{DType::kI32, rows}, {DType::kF64, rows}};
}

OperatorPtr make_choose_token() {
  return std::make_shared<ChooseToken>();
}

int32_t choose_token(std::span<const double> log_probabilities, const TokenRule& rule,
                     std::span<int32_t> ids, std::span<double> weights) {
  if (rule.temperature == 0) return rank_tokens(log_probabilities, rule.vocab_size, 1, ids).front();
  const auto ranked = rank_tokens(log_probabilities, rule.vocab_size, rule.top_k, ids);
  const auto kept = weigh_tokens(log_probabilities, ranked, rule, weights);
  double left = static_cast<double>(rule.uniform) * 0x1.0p-53 *
                std::accumulate(kept.begin(), kept.end(), 0.0);
  for (size_t i = 0; i < kept.size(); ++i) {
    if (left < kept[i]) return ranked[i];
    left -= kept[i];
  }
  return ranked[kept.size() - 1];
}

void log_softmax(std::span<const double> logits, std::span<double> log_probabilities) {
  const double largest = *std::ranges::max_element(logits);
  double sum = 0;
  for (const double value : logits) sum += std::exp(value - largest);
  const double normaliser = largest + std::log(sum);
  std::ranges::transform(logits, log_probabilities.begin(),
                         [&](double value) { return value - normaliser; });
}

}  // namespace tessera
