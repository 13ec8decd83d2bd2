#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "ops/attention/attention.h"

/// Attention as its definition says it, in double, for the tests.
namespace tessera::testing {

inline double keep(double x) {
  return x;
}
/// To BF16 and back: what a naive BF16 computation does to a value that it stores.
inline double round_bf16(double x) {
  return static_cast<float>(Bf16(static_cast<float>(x)));
}

/// One problem: packed sequences of the given lengths. All matrices row-major, as the operator's.
struct ReferenceAttention {
  AttentionSpec spec;  ///< with its defaults filled in
  std::vector<int64_t> lengths;
  std::vector<double> q, k, v;
  double (*round)(double) = keep;  ///< applied to probabilities, their gradients and results

  std::vector<double> o = {}, lse = {};
  std::vector<double> grad_q = {}, grad_k = {}, grad_v = {};

  int64_t num_tokens() const {
    int64_t total = 0;
    for (const int64_t length : lengths) total += length;
    return total;
  }

  void run_forward() {
    const int64_t tokens = num_tokens();
    o.assign(tokens * spec.num_heads * spec.head_size_v, 0);
    lse.assign(spec.num_heads * tokens, 0);
    for_each_row([&](const Row& row) {
      const std::vector<double> probs = softmax(row, lse[row.lse_index]);
      for (int64_t c = 0; c < spec.head_size_v; ++c) {
        double sum = 0;
        for (int64_t j = row.first; j <= row.token; ++j) {
          sum += round(probs[j - row.first]) * v[row.v_at(*this, j, c)];
        }
        o[row.o_at(*this, c)] = round(sum);
      }
    });
  }

  void run_backward(const std::vector<double>& grad_o, const std::vector<double>& grad_lse) {
    grad_q.assign(q.size(), 0);
    grad_k.assign(k.size(), 0);
    grad_v.assign(v.size(), 0);
    for_each_row([&](const Row& row) { add_row_gradients(row, grad_o, grad_lse); });
    for (auto* grads : {&grad_q, &grad_k, &grad_v}) {
      for (double& x : *grads) x = round(x);
    }
  }

 private:
  struct Row {
    int64_t token, first, head, kv_head;
    size_t lse_index;

    static size_t index(int64_t row, int64_t heads, int64_t head, int64_t size, int64_t c) {
      return (row * heads + head) * size + c;
    }
    size_t q_at(const ReferenceAttention& a, int64_t c) const {
      return index(token, a.spec.num_heads, head, a.spec.head_size, c);
    }
    size_t o_at(const ReferenceAttention& a, int64_t c) const {
      return index(token, a.spec.num_heads, head, a.spec.head_size_v, c);
    }
    size_t k_at(const ReferenceAttention& a, int64_t key, int64_t c) const {
      return index(key, a.spec.num_kv_heads, kv_head, a.spec.head_size, c);
    }
    size_t v_at(const ReferenceAttention& a, int64_t key, int64_t c) const {
      return index(key, a.spec.num_kv_heads, kv_head, a.spec.head_size_v, c);
    }
  };

  template <typename Visit>
  void for_each_row(const Visit& visit) {
    const int64_t tokens = num_tokens();
    int64_t begin = 0;
    for (const int64_t length : lengths) {
      for (int64_t i = 0; i < length; ++i) {
        const int64_t first = spec.window > 0 ? std::max<int64_t>(0, i - spec.window + 1) : 0;
        for (int64_t head = 0; head < spec.num_heads; ++head) {
          visit(Row{begin + i, begin + first, head, head * spec.num_kv_heads / spec.num_heads,
                    static_cast<size_t>(head * tokens + begin + i)});
        }
      }
      begin += length;
    }
  }

  std::vector<double> softmax(const Row& row, double& log_sum) const {
    std::vector<double> scores;
    double max = -HUGE_VAL;
    for (int64_t j = row.first; j <= row.token; ++j) {
      double score = 0;
      for (int64_t c = 0; c < spec.head_size; ++c)
        score += q[row.q_at(*this, c)] * k[row.k_at(*this, j, c)];
      scores.push_back(score * spec.scale);
      max = std::max(max, scores.back());
    }
    double sum = 0;
    for (const double score : scores) sum += std::exp(score - max);
    log_sum = max + std::log(sum);
    for (double& score : scores) score = std::exp(score - log_sum);
    return scores;
  }

  void add_row_gradients(const Row& row, const std::vector<double>& grad_o,
                         const std::vector<double>& grad_lse) {
    double log_sum = 0;
    const std::vector<double> probs = softmax(row, log_sum);
    std::vector<double> grad_probs;
    double delta = grad_lse.empty() ? 0 : -grad_lse[row.lse_index];
    for (size_t i = 0; i < probs.size(); ++i) {
      double grad = 0;
      const int64_t key = row.first + static_cast<int64_t>(i);
      for (int64_t c = 0; c < spec.head_size_v; ++c) {
        grad += grad_o[row.o_at(*this, c)] * v[row.v_at(*this, key, c)];
        grad_v[row.v_at(*this, key, c)] += round(probs[i]) * grad_o[row.o_at(*this, c)];
      }
      grad_probs.push_back(grad);
      delta += probs[i] * grad;
    }
    for (size_t i = 0; i < probs.size(); ++i) {
      const int64_t key = row.first + static_cast<int64_t>(i);
      const double grad = round(probs[i] * (grad_probs[i] - delta)) * spec.scale;
      for (int64_t c = 0; c < spec.head_size; ++c) {
        grad_q[row.q_at(*this, c)] += grad * k[row.k_at(*this, key, c)];
        grad_k[row.k_at(*this, key, c)] += grad * q[row.q_at(*this, c)];
      }
    }
  }
};

}  // namespace tessera::testing
