#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "ops/choose_token/choose_token.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

struct Chosen {
  std::vector<int32_t> tokens;
  std::vector<double> log_probabilities;
};

inline Chosen run_choose_token(const Backend& backend, const Tensor& logits,
                               const std::vector<TokenRule>& rules) {
  const auto count = std::ssize(rules);
  const OwnedTensor bytes(DType::kU8, {count, int64_t{sizeof(TokenRule)}});
  std::ranges::copy(rules, static_cast<TokenRule*>(bytes.get().data));
  const OwnedTensor own_logits = copy_to(backend, logits);
  const OwnedTensor own_rules = copy_to(backend, bytes);
  const OwnedTensor tokens(DType::kI32, {count}, "tokens", backend.device());
  const OwnedTensor log_probabilities(DType::kF64, {count}, "numbers", backend.device());
  const Tensor inputs[] = {own_logits, own_rules};
  const Tensor outputs[] = {tokens, log_probabilities};
  run_kernel(*make_choose_token(), backend, inputs, outputs);
  const OwnedTensor ids = copy_to_host(backend, tokens);
  const OwnedTensor numbers = copy_to_host(backend, log_probabilities);
  const auto all_ids = ids.get().span<int32_t>();
  const auto all_numbers = numbers.get().span<double>();
  return {{all_ids.begin(), all_ids.end()}, {all_numbers.begin(), all_numbers.end()}};
}

inline std::vector<double> log_probabilities_of(std::vector<double> row) {
  log_softmax(row, row);
  return row;
}

/// With what share each token is drawn, by the definition.
inline std::vector<double> shares_of(const std::vector<double>& row, const TokenRule& rule) {
  const size_t limit =
      rule.vocab_size > 0 ? std::min(row.size(), static_cast<size_t>(rule.vocab_size)) : row.size();
  std::vector<int32_t> ids(limit);
  std::iota(ids.begin(), ids.end(), 0);
  std::ranges::stable_sort(ids, [&](int32_t a, int32_t b) { return row[a] > row[b]; });
  std::vector<double> shares(row.size());
  const double best = row[ids.front()];
  if (rule.temperature == 0) {
    shares[ids.front()] = 1;
    return shares;
  }
  if (rule.top_k > 0) ids.resize(std::min(limit, static_cast<size_t>(rule.top_k)));
  double all = 0;
  for (const int32_t id : ids) all += std::exp((row[id] - best) / rule.temperature);
  double kept = 0;
  for (const int32_t id : ids) {
    if (kept >= rule.top_p * all * (1 - 1e-6)) break;
    kept += shares[id] = std::exp((row[id] - best) / rule.temperature);
  }
  for (double& share : shares) share /= kept;
  return shares;
}

/// Draws with uniform numbers that divide [0, 1) evenly: each token comes as often as its share
/// says, to within the draws at its ends.
inline void check_draws(const Backend& backend, const Tensor& row_logits, const TokenRule& rule) {
  SCOPED_TRACE(fmt::format("{} of {} tokens, temperature {}, top_k {}, top_p {}", rule.vocab_size,
                           row_logits.shape[1], rule.temperature, rule.top_k, rule.top_p));
  constexpr int64_t kDraws = 1000;
  const int64_t size = row_logits.shape[1];
  const OwnedTensor logits(row_logits.dtype, {kDraws, size});
  std::vector<TokenRule> rules(kDraws, rule);
  for (int64_t i = 0; i < kDraws; ++i) {
    std::memcpy(static_cast<std::byte*>(logits.get().data) + i * row_logits.num_bytes(),
                row_logits.data, row_logits.num_bytes());
    rules[i].uniform = static_cast<uint64_t>(i * 2 + 1) * (uint64_t{1} << 52) / kDraws;
  }
  const Chosen chosen = run_choose_token(backend, logits, rules);
  const std::vector<double> row = to_doubles(row_logits);
  const std::vector<double> log_probabilities = log_probabilities_of(row);
  const std::vector<double> shares = shares_of(row, rule);
  std::vector<int64_t> counts(size);
  for (int64_t i = 0; i < kDraws; ++i) {
    const int32_t token = chosen.tokens[i];
    ASSERT_TRUE(token >= 0 && token < size) << token;
    ++counts[token];
    EXPECT_NEAR(chosen.log_probabilities[i], log_probabilities[token], 3e-6);
  }
  for (int64_t id = 0; id < size; ++id) {
    EXPECT_NEAR(static_cast<double>(counts[id]), kDraws * shares[id], 1.1) << id;
    if (shares[id] == 0) {
      EXPECT_EQ(counts[id], 0) << id;
    }
  }
}

/// Rows of all sizes, some logits equal, with every cut.
inline void check_all_draws(const Backend& backend) {
  Random random(3, 1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t size : {1, 7, 40, 333, 1024}) {
      const OwnedTensor logits = random_tensor(dtype, {1, size}, random, 2.0);
      for (const TokenRule& rule : std::initializer_list<TokenRule>{
               {},
               {.temperature = 0},
               {.temperature = 0.7, .top_k = 5},
               {.temperature = 2.5, .top_p = 0.8},
               {.top_p = 0.5, .top_k = 30},
               {.top_p = 0.9, .vocab_size = static_cast<int32_t>((size + 1) / 2)},
               {.temperature = 1e-300},
               {.top_p = 1e-9}})
        check_draws(backend, logits, rule);
    }
  }
}

/// Few different logits: cuts fall between equal ones, of which the lower ids are kept.
inline void check_ties(const Backend& backend) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const OwnedTensor logits(dtype, {1, 600});
    for (int64_t i = 0; i < 600; ++i) {
      const float value = std::array{-1.0F, 0.0F, -0.0F, 0.5F}[i * i % 4];
      if (dtype == DType::kF32) {
        logits.get().as<float>()[i] = value;
      } else {
        logits.get().as<Bf16>()[i] = Bf16(value);
      }
    }
    for (const TokenRule& rule : std::initializer_list<TokenRule>{
             {.temperature = 0}, {.top_k = 100}, {.top_p = 0.45}, {.top_p = 0.31, .top_k = 310}})
      check_draws(backend, logits, rule);
  }
}

/// Rows that are not drawn.
inline void check_given(const Backend& backend) {
  Random random(5, 1);
  const int64_t size = 37;
  const OwnedTensor logits = random_tensor(DType::kF32, {6, size}, random);
  const std::vector<double> all = to_doubles(logits);
  float* const values = logits.get().as<float>();
  values[3 * size + 5] = NAN;
  values[4 * size + 36] = INFINITY;
  std::fill_n(values + 5 * size, size, -INFINITY);
  std::vector<TokenRule> rules(6, TokenRule{.given = 7});
  rules[1].given = TokenRule::kNothing;
  rules[2].given = 36;
  rules[4].given = TokenRule::kChoose;
  const Chosen chosen = run_choose_token(backend, logits, rules);
  EXPECT_EQ(chosen.tokens, (std::vector<int32_t>{7, -1, 36, -1, -1, -1}));
  EXPECT_EQ(chosen.log_probabilities[1], 0);
  for (const int row : {0, 2}) {
    const auto own =
        log_probabilities_of({all.begin() + row * size, all.begin() + (row + 1) * size});
    EXPECT_NEAR(chosen.log_probabilities[row], own[chosen.tokens[row]], 3e-6);
  }
  for (const int row : {3, 4, 5}) EXPECT_TRUE(std::isnan(chosen.log_probabilities[row])) << row;
}

}  // namespace tessera::testing
