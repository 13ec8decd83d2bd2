#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

/// A token's weights of residual streams and their gradients (stream_weights.h), for CPUs and GPUs.
namespace tessera {

inline constexpr int64_t kMaxStreams = 8;
inline constexpr int64_t kMaxSinkhornIterations = 64;

/// What of StreamWeightsSpec a token's weights need.
struct StreamRule {
  int iterations;
  float eps;
  bool collapses;
};

TESSERA_HOST_DEVICE_INLINE float stream_logistic(float z) {
  return 1.0F / (1.0F + std::exp(-z));
}

/// A matrix [n, n] that Sinkhorn's iteration makes doubly stochastic, what it divided by at each of
/// its steps, and the softmax that it began with.
template <int kStreams>
struct SinkhornMatrix {
  float at[kStreams][kStreams];
  float softmax[kStreams][kStreams];
  float sums[2 * kMaxSinkhornIterations - 1][kStreams];

  /// Of logits row by row.
  TESSERA_HOST_DEVICE_INLINE SinkhornMatrix(const float* z, const StreamRule& rule) {
    for (int i = 0; i < kStreams; ++i) start_row(i, z + i * kStreams, rule.eps);
    for (int step = 0; step < 2 * rule.iterations - 1; ++step) {
      for (int line = 0; line < kStreams; ++line) divide_line(step, line, rule.eps);
    }
  }

  /// Makes gradients of the result, in `grads`, those of the logits; the matrix is left as it was
  /// in the beginning.
  TESSERA_HOST_DEVICE_INLINE void go_back(const StreamRule& rule,
                                          float (&grads)[kStreams][kStreams]) {
    for (int step = 2 * rule.iterations - 2; step >= 0; --step) {
      for (int line = 0; line < kStreams; ++line) multiply_line(step, line, grads);
    }
    for (int i = 0; i < kStreams; ++i) {
      float dot = 0;
      for (int j = 0; j < kStreams; ++j) dot += softmax[i][j] * grads[i][j];
      for (int j = 0; j < kStreams; ++j) grads[i][j] = softmax[i][j] * (grads[i][j] - dot);
    }
  }

 private:
  TESSERA_HOST_DEVICE_INLINE void start_row(int i, const float* z, float eps) {
    float largest = z[0];
    for (int j = 1; j < kStreams; ++j) largest = z[j] > largest ? z[j] : largest;
    float sum = 0;
    for (int j = 0; j < kStreams; ++j) {
      softmax[i][j] = std::exp(z[j] - largest);
      sum += softmax[i][j];
    }
    for (int j = 0; j < kStreams; ++j) {
      softmax[i][j] /= sum;
      at[i][j] = softmax[i][j] + eps;
    }
  }
  /// Lines are columns at even steps and rows at odd ones.
  template <typename Matrix>
  static TESSERA_HOST_DEVICE_INLINE auto& element(Matrix& matrix, int step, int line, int i) {
    return step % 2 == 0 ? matrix[i][line] : matrix[line][i];
  }
  TESSERA_HOST_DEVICE_INLINE void divide_line(int step, int line, float eps) {
    float sum = eps;
    for (int i = 0; i < kStreams; ++i) sum += element(at, step, line, i);
    for (int i = 0; i < kStreams; ++i) element(at, step, line, i) /= sum;
    sums[step][line] = sum;
  }
  /// With c = b / (Σ b + eps), db = (dc - Σ dc · c) / (Σ b + eps).
  TESSERA_HOST_DEVICE_INLINE void multiply_line(int step, int line,
                                                float (&grads)[kStreams][kStreams]) {
    const float sum = sums[step][line];
    float dot = 0;
    for (int i = 0; i < kStreams; ++i)
      dot += element(at, step, line, i) * element(grads, step, line, i);
    for (int i = 0; i < kStreams; ++i) {
      float& grad = element(grads, step, line, i);
      grad = (grad - dot) / sum;
      element(at, step, line, i) *= sum;
    }
  }
};

/// A token's n + n + n·n logits behind scale and base, or n where streams collapse.
template <int kStreams>
struct TokenStreams {
  static constexpr int kLogits = (2 + kStreams) * kStreams;
  float z[kLogits];

  TESSERA_HOST_DEVICE_INLINE TokenStreams(const StreamRule& rule, const float* logits,
                                          const float* scale, const float* base) {
    for (int m = 0; m < count(rule); ++m) z[m] = logits[m] * scale[part_of(m)] + base[m];
  }

  static TESSERA_HOST_DEVICE_INLINE int count(const StreamRule& rule) {
    return rule.collapses ? kStreams : kLogits;
  }
  /// Which of the outputs logit m is of.
  static TESSERA_HOST_DEVICE_INLINE int part_of(int m) {
    return m < kStreams ? 0 : m < 2 * kStreams ? 1 : 2;
  }

  /// post and comb may be null where streams collapse.
  TESSERA_HOST_DEVICE_INLINE void write(const StreamRule& rule, float* pre, float* post,
                                        float* comb) const {
    for (int j = 0; j < kStreams; ++j) pre[j] = stream_logistic(z[j]) + rule.eps;
    if (rule.collapses) return;
    for (int j = 0; j < kStreams; ++j) post[j] = 2.0F * stream_logistic(z[kStreams + j]);
    const SinkhornMatrix<kStreams> matrix(z + 2 * kStreams, rule);
    for (int i = 0; i < kStreams; ++i) {
      for (int j = 0; j < kStreams; ++j) comb[i * kStreams + j] = matrix.at[i][j];
    }
  }

  /// Gradients of z, from those of the outputs.
  TESSERA_HOST_DEVICE_INLINE void write_grads(const StreamRule& rule, const float* pre,
                                              const float* post, const float* comb,
                                              float* grads) const {
    for (int j = 0; j < kStreams; ++j) grads[j] = slope(z[j]) * pre[j];
    if (rule.collapses) return;
    for (int j = 0; j < kStreams; ++j)
      grads[kStreams + j] = 2.0F * slope(z[kStreams + j]) * post[j];
    SinkhornMatrix<kStreams> matrix(z + 2 * kStreams, rule);
    float of_comb[kStreams][kStreams];
    for (int i = 0; i < kStreams; ++i) {
      for (int j = 0; j < kStreams; ++j) of_comb[i][j] = comb[i * kStreams + j];
    }
    matrix.go_back(rule, of_comb);
    for (int i = 0; i < kStreams; ++i) {
      for (int j = 0; j < kStreams; ++j) grads[(2 + i) * kStreams + j] = of_comb[i][j];
    }
  }

 private:
  static TESSERA_HOST_DEVICE_INLINE float slope(float logit) {
    const float s = stream_logistic(logit);
    return s * (1.0F - s);
  }
};

/// Calls run.template operator()<n>() for n streams, from 1 to kMaxStreams.
template <int kStreams = 1, typename Run>
void with_streams(int64_t streams, Run run) {
  if constexpr (kStreams <= kMaxStreams) {
    if (streams == kStreams) return run.template operator()<kStreams>();
    with_streams<kStreams + 1>(streams, run);
  }
}

}  // namespace tessera
