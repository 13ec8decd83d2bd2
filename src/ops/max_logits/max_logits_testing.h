#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/attention/attention_testing.h"
#include "ops/max_logits/max_logits.h"

namespace tessera::testing {

/// Queries and keys of packed sequences, with what attention leaves of them.
struct LogitsCase {
  AttentionSpec spec;
  std::vector<int64_t> lengths;
  DType dtype = DType::kF32;
  /// Rows of tokens behind those of the sequences.
  int64_t rest = 0;

  int64_t num_tokens() const {
    int64_t total = rest;
    for (const int64_t length : lengths) total += length;
    return total;
  }
};

struct LogitsData {
  OwnedTensor q, k, lse, cu_seqlens;
  std::vector<std::vector<double>> row_max;  ///< [heads][tokens]
};

/// Some rows are much larger than others, so that limits divide them.
inline LogitsData make_logits(const LogitsCase& c, uint64_t seed) {
  const AttentionSpec spec = MaxLogits({.attention = c.spec}).spec();
  const int64_t tokens = c.num_tokens();
  const int64_t size = spec.head_size;
  Random random(seed, 1);
  LogitsData data{.q = random_tensor(c.dtype, {tokens, spec.num_heads * size}, random, 2.0),
                  .k = random_tensor(c.dtype, {tokens, spec.num_kv_heads * size}, random, 1.0),
                  .lse = OwnedTensor(DType::kF32, {spec.num_heads, tokens}),
                  .cu_seqlens = cumulative(c.lengths),
                  .row_max = {}};
  const auto q = to_doubles(data.q);
  const auto k = to_doubles(data.k);
  const auto lse = data.lse.get().span<float>();
  std::ranges::fill(lse, std::numeric_limits<float>::quiet_NaN());
  for (int64_t head = 0; head < spec.num_heads; ++head) {
    auto& row_max = data.row_max.emplace_back(tokens, kNoLogit);
    const int64_t kv_head = head / (spec.num_heads / spec.num_kv_heads);
    int64_t begin = 0;
    for (const int64_t length : c.lengths) {
      for (int64_t i = begin; i < begin + length; ++i) {
        double sum = 0;
        for (int64_t j = spec.window > 0 ? std::max(begin, i - spec.window + 1) : begin; j <= i;
             ++j) {
          double logit = 0;
          for (int64_t e = 0; e < size; ++e)
            logit += q[(i * spec.num_heads + head) * size + e] *
                     k[(j * spec.num_kv_heads + kv_head) * size + e];
          logit *= spec.scale;
          sum += std::exp(logit);
          row_max[i] = std::max(row_max[i], logit);
        }
        lse[head * tokens + i] = static_cast<float>(std::log(sum));
      }
      begin += length;
    }
  }
  return data;
}

inline TokenRows rows_of(const Zigzag& tokens, int64_t rank) {
  return MaxLogits({.attention = heads(1, 1, 1), .tokens = tokens, .rank = rank}).rows();
}

/// What the operator gives, by its definition.
inline std::vector<double> expected_logits(const LogitsData& data, float limit) {
  std::vector<double> result;
  const auto lse = data.lse.get().span<float>();
  size_t at = 0;
  for (const auto& rows : data.row_max) {
    double most = kNoLogit;
    for (const double row : rows) {
      const float bound = lse[at++];
      if (std::isnan(bound)) continue;  // no sequence has it
      most = std::max(most, bound > limit ? row : bound);
    }
    result.push_back(most);
  }
  return result;
}

inline std::vector<LogitsCase> logits_cases() {
  return {
      {heads(1, 1, 1), {1}},
      {heads(1, 1, 4), {}},
      {heads(3, 3, 8), {0, 7, 0, 1, 40, 0}},
      {heads(6, 2, 5), {33, 100}},
      {heads(4, 1, 24, 16), {70, 1, 60}},
      {heads(4, 4, 16, 16, 3), {50, 5}},
      {heads(2, 2, 192, 128, 70), {131, 66}},
      {heads(8, 4, 64), {257}},
  };
}

/// Looks at all rows, at none, and at some.
inline std::vector<float> logit_limits() {
  return {-1e30F, 1e30F, 3.0F};
}

}  // namespace tessera::testing
