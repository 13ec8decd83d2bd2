#pragma once

#include <span>

#include "ops/choose_token/token_rule.h"
#include "ops/operator.h"

namespace tessera {

/// The next token of each row, for generation.
///
/// Inputs logits A [R, V] and rules U8 [R, sizeof(TokenRule)]: a TokenRule a row. Outputs token I32
/// [R], the chosen or given one, and log_probability F64 [R], its own under the model, before
/// temperature and cuts. A row whose rule has kNothing gives −1 and 0; one with NaN or without
/// finite probabilities −1 and NaN. No gradient.
class ChooseToken final : public Operator {
 public:
  static constexpr std::string_view kName = "choose_token";
  enum Input : int { kLogits, kRules };
  enum Output : int { kToken, kLogProbability };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool recomputable() const override { return false; }
};

OperatorPtr make_choose_token();

/// Chooses one of `log_probabilities`, none of which is NaN, by a rule that chooses. The order of a
/// draw is that of falling probability. Scratch: ids and weights, each as long.
int32_t choose_token(std::span<const double> log_probabilities, const TokenRule& rule,
                     std::span<int32_t> ids, std::span<double> weights);

/// Log-probabilities of all tokens from a row of logits, in double, which may be in the same place.
void log_softmax(std::span<const double> logits, std::span<double> log_probabilities);

/// In double; bits are a function of the row and its rule alone.
void add_choose_token_cpu(KernelTable& table);
/// Weights are whole multiples of 2^-40 of the largest, so that their sums have no order, and are
/// drawn in the order of ids: of the same uniform number another token may come than on the CPU.
/// The log-probability is a sum in F32.
void add_choose_token_cuda(KernelTable& table);

}  // namespace tessera
