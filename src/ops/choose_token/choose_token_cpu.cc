#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/choose_token/choose_token.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using Op = ChooseToken;

/// A thread's scratch memory.
struct Scratch {
  explicit Scratch(int64_t vocab_size)
      : log_probabilities(layout.add<double>(vocab_size)),
        weights(layout.add<double>(vocab_size)),
        ids(layout.add<int32_t>(vocab_size)) {}

  WorkspaceLayout layout;
  int64_t log_probabilities;
  int64_t weights;
  int64_t ids;
};

struct Choice {
  int32_t token = -1;
  double log_probability = 0;
};

template <typename T>
void widen(std::span<const T> row, std::span<double> into) {
  std::ranges::transform(row, into.begin(),
                         [](T x) { return static_cast<double>(static_cast<float>(x)); });
}

Choice choose(const Tensor& logits, int64_t row, const TokenRule& rule,
              std::span<std::byte> memory) {
  if (rule.given == TokenRule::kNothing) return {};
  const int64_t size = logits.shape[1];
  const Scratch scratch(size);
  const std::span values(workspace_part<double>(memory, scratch.log_probabilities), size);
  if (logits.dtype == DType::kF32) {
    widen(std::span<const float>(logits.as<float>() + row * size, size), values);
  } else {
    widen(std::span<const Bf16>(logits.as<Bf16>() + row * size, size), values);
  }
  log_softmax(values, values);
  if (std::ranges::any_of(values, [](double x) { return std::isnan(x); }))
    return {-1, std::numeric_limits<double>::quiet_NaN()};
  const int32_t token =
      rule.given >= 0
          ? rule.given
          : choose_token(values, rule,
                         {workspace_part<int32_t>(memory, scratch.ids), values.size()},
                         {workspace_part<double>(memory, scratch.weights), values.size()});
  return {token, values[token]};
}

void choose_tokens(const ChooseToken& /*op*/, const Args<ChooseToken>& args) {
  const Tensor& logits = args.in(Op::kLogits);
  const auto* const rules = reinterpret_cast<const TokenRule*>(args.in(Op::kRules).data);
  auto* const tokens = args.out(Op::kToken).as<int32_t>();
  auto* const log_probabilities = args.out(Op::kLogProbability).as<double>();
  for (int64_t row = 0; row < logits.shape[0]; ++row)
    ensure(rules[row].given < logits.shape[1], "choose_token: token {} of {}", rules[row].given,
           logits.shape[1]);
  const int64_t bytes = Scratch(logits.shape[1]).layout.num_bytes();
#pragma omp parallel for schedule(dynamic, 1) \
    num_threads(static_cast <int>(std::ssize(args.workspace) / bytes))
  for (int64_t row = 0; row < logits.shape[0]; ++row) {
    const Choice choice = choose(logits, row, rules[row],
                                 args.workspace.subspan(omp_get_thread_num() * bytes, bytes));
    tokens[row] = choice.token;
    log_probabilities[row] = choice.log_probability;
  }
}

int64_t choose_token_workspace(const ChooseToken& /*op*/, std::span<const ValueType> inputs) {
  return omp_get_max_threads() * Scratch(inputs[Op::kLogits].shape[1]).layout.num_bytes();
}

}  // namespace

void add_choose_token_cpu(KernelTable& table) {
  add_kernel<ChooseToken>(table, choose_tokens, {.workspace = choose_token_workspace});
}

}  // namespace tessera
