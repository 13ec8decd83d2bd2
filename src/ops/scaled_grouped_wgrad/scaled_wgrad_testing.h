#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/quantize_tokens/quantize_tokens_testing.h"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad.h"
#include "ops/testing/op_test.h"

/// A gradient of scaled values, for tests on CPUs and GPUs.
namespace tessera::testing {

struct ScaledWgradCase {
  std::vector<int64_t> sizes;
  std::vector<int64_t> tokens_of;
  int64_t columns = 0;
  bool by_block = false;

  TokenScales scales() const { return by_block ? TokenScales::kBlock : TokenScales::kGroup; }
  int64_t num_tokens() const {
    return std::accumulate(tokens_of.begin(), tokens_of.end(), int64_t{0});
  }
  int64_t total() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }
  int64_t largest() const { return std::ranges::max(sizes); }
  std::string to_string() const {
    return fmt::format("sizes {} tokens {} columns {}{}", sizes, tokens_of, columns,
                       by_block ? " by block" : "");
  }
};

/// A case's operands and their product in F64.
class ScaledWgradData {
 public:
  explicit ScaledWgradData(const ScaledWgradCase& test)
      : test_(test),
        offsets_(ends_of(test.tokens_of)),
        narrow_(make_operand(test.largest())),
        wide_(make_operand(test.columns)) {}

  const std::vector<int64_t>& offsets() const { return offsets_; }
  const TokenCodes& narrow() const { return narrow_; }
  const TokenCodes& wide() const { return wide_; }

  /// Row by row, since a lost token must be found: `error` in parts of the root of a row's sum of
  /// squares.
  void expect_gradient(const std::vector<float>& found, float before, double error) const {
    int64_t weight_row = 0;
    for (int64_t e = 0; e < std::ssize(test_.sizes); ++e) {
      const std::vector<double> narrow = values_of(narrow_, e, test_.sizes[e]);
      const std::vector<double> wide = values_of(wide_, e, test_.columns);
      for (int64_t r = 0; r < test_.sizes[e]; ++r, ++weight_row)
        expect_row(found.data() + weight_row * test_.columns, before, error,
                   narrow.data() + r * test_.tokens_of[e], wide, test_.tokens_of[e]);
    }
  }

 private:
  /// Tokens whose values differ much from feature to feature, and from block to block.
  TokenCodes make_operand(int64_t columns) {
    const OwnedTensor values = random_tensor(DType::kBF16, {offsets_.back(), columns}, random_);
    auto* const at = values.get().as<Bf16>();
    for (int64_t i = 0; i < offsets_.back() * columns; ++i) {
      const int64_t power = i % columns % 7 - i / columns / 100 % 5;
      at[i] = Bf16(static_cast<float>(at[i]) * std::exp2(static_cast<float>(power)));
    }
    return quantize_tokens(values.get(), test_.scales(), offsets_);
  }

  /// [rows, tokens] of an expert.
  std::vector<double> values_of(const TokenCodes& codes, int64_t expert, int64_t rows) const {
    const int64_t first = first_token_block(offsets_[expert], expert) * kTokenBlock;
    std::vector<double> values;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t t = 0; t < test_.tokens_of[expert]; ++t)
        values.push_back(codes.value(test_.scales(), expert, first + t, r));
    return values;
  }

  void expect_row(const float* found, float before, double error, const double* narrow,
                  const std::vector<double>& wide, int64_t tokens) const {
    double difference = 0;
    double norm = 0;
    for (int64_t c = 0; c < test_.columns; ++c) {
      double sum = 0;
      for (int64_t t = 0; t < tokens; ++t) sum += narrow[t] * wide[c * tokens + t];
      const double off = found[c] - before - sum;
      difference += off * off;
      norm += sum * sum + 1e-8 * before * before;
    }
    ASSERT_LE(std::sqrt(difference), error * std::sqrt(norm)) << test_.to_string();
  }

  ScaledWgradCase test_;
  Random random_{11, 1};
  std::vector<int64_t> offsets_;
  TokenCodes narrow_;
  TokenCodes wide_;
};

/// Any numbers of tokens, and sizes that are multiples of `unit`.
inline ScaledWgradCase random_scaled_wgrad(Random& random, int64_t unit, bool by_block) {
  const auto below = [&](uint64_t end) { return static_cast<int64_t>(random.next_below(end)); };
  ScaledWgradCase test{.columns = unit * (1 + below(480 / unit)), .by_block = by_block};
  const int64_t experts = 1 + below(6);
  for (int64_t e = 0; e < experts; ++e) {
    test.sizes.push_back(unit * (1 + below(480 / unit)));
    test.tokens_of.push_back(below(4) == 0 ? below(3) : below(2) * below(500));
  }
  test.tokens_of.back() += 1;
  return test;
}

}  // namespace tessera::testing
