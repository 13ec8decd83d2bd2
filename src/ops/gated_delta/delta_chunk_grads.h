#pragma once

#include "ops/gated_delta/delta_chunk.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

/// Gradients of one chunk's values, from those of its outputs and of the state behind it
/// (delta_chunk.h has the names).
struct DeltaChunkGrads {
  float* o = nullptr;          // [C, Dv], given
  float* q = nullptr;          // [C, Dk], added to
  float* k = nullptr;          // [C, Dk], added to
  float* k_decayed = nullptr;  // [C, Dk]
  float* v = nullptr;          // [C, Dv]
  float* written = nullptr;    // [C, Dv]; then of R
  float* scaled = nullptr;     // [C, Dv]
  float* turned = nullptr;     // [Dv, max(C, Dk)]
  float* square = nullptr;     // [C, C]
  float* decay = nullptr;      // [C], of G
  float* beta = nullptr;       // [C]

  static DeltaChunkGrads place(const GatedDeltaSpec& spec, WorkspaceLayout& layout,
                               std::span<std::byte> memory) {
    const int64_t keys = kDeltaChunk * spec.key_size;
    const int64_t values = kDeltaChunk * spec.value_size;
    DeltaChunkGrads grads;
    for (float** part : {&grads.q, &grads.k, &grads.k_decayed})
      *part = workspace_part<float>(memory, layout.add<float>(keys));
    for (float** part : {&grads.o, &grads.v, &grads.written, &grads.scaled})
      *part = workspace_part<float>(memory, layout.add<float>(values));
    grads.turned = workspace_part<float>(
        memory, layout.add<float>(spec.value_size * std::max(kDeltaChunk, spec.key_size)));
    grads.square = workspace_part<float>(memory, layout.add<float>(kDeltaChunk * kDeltaChunk));
    for (float** part : {&grads.decay, &grads.beta})
      *part = workspace_part<float>(memory, layout.add<float>(kDeltaChunk));
    return grads;
  }

  /// `state_grad` [Dk, Dv] is that of the state behind the chunk, and becomes that of the state
  /// before it. REQUIRES c.query() with `state`, and o.
  void run(const DeltaChunk& c, const float* state, float* state_grad) {
    add_of_new_state(c, state, state_grad);
    add_of_outputs(c);
    solve_transposed(c);
    add_of_inverse(c);
    add_of_right_side(c);
    add_of_state(c, state, state_grad);
  }

 private:
  void add_of_new_state(const DeltaChunk& c, const float* state, const float* state_grad) {
    const int64_t n = c.count;
    const int64_t last = n - 1;
    std::fill_n(decay, n, 0.0F);
    decay[last] = c.whole_decay() * dot_rows(state, state_grad, c.key_size * c.value_size);
    std::fill_n(written, n * c.value_size, 0.0F);
    add_small_product(written, {c.k_decayed, c.key_size, 1}, state_grad, n, c.value_size,
                      c.key_size);
    turn_matrix(turned, state_grad, c.key_size, c.value_size);
    std::fill_n(k_decayed, n * c.key_size, 0.0F);
    add_small_product(k_decayed, {c.written, c.value_size, 1}, turned, n, c.key_size, c.value_size);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t at = j * c.key_size;
      add_scaled_row(k + at, c.decay_between(last, j), k_decayed + at, c.key_size);
      const float of_decay = dot_rows(k_decayed + at, c.k_decayed + at, c.key_size);
      decay[last] += of_decay;
      decay[j] -= of_decay;
    }
  }

  /// Of o = exp(G) q S + P D, but for the state's.
  void add_of_outputs(const DeltaChunk& c) {
    const int64_t n = c.count;
    add_small_product(written, {c.p, 1, n}, o, n, c.value_size, n);
    turn_matrix(turned, c.written, n, c.value_size);
    std::fill_n(square, n * n, 0.0F);
    add_small_product(square, {o, c.value_size, 1}, turned, n, n, c.value_size);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        float& of_p = square[i * n + j];
        const float of_decay = of_p * c.p[i * n + j];
        decay[i] += of_decay;
        decay[j] -= of_decay;
        of_p *= c.decay_between(i, j);
      }
      std::fill(square + i * n + i + 1, square + (i + 1) * n, 0.0F);
      const int64_t at = i * c.value_size;
      decay[i] += std::exp(c.decay[i]) * dot_rows(c.q_state + at, o + at, c.value_size);
    }
    add_small_product(q, {square, n, 1}, c.k, n, c.key_size, n);
    add_small_product(k, {square, 1, n}, c.q, n, c.key_size, n);
  }

  /// From the gradient of D that of R: (I + A)ᵀ has ones on its diagonal too.
  void solve_transposed(const DeltaChunk& c) {
    for (int64_t i = c.count - 1; i > 0; --i) {
      for (int64_t j = 0; j < i; ++j)
        add_scaled_row(written + j * c.value_size, -c.a[i * c.count + j],
                       written + i * c.value_size, c.value_size);
    }
  }

  /// Of A, whose gradient is -(that of R) Dᵀ.
  void add_of_inverse(const DeltaChunk& c) {
    const int64_t n = c.count;
    std::fill_n(square, n * n, 0.0F);
    add_small_product(square, {written, c.value_size, 1}, turned, n, n, c.value_size);
    for (int64_t i = 0; i < n; ++i) {
      float of_beta = 0;
      for (int64_t j = 0; j < i; ++j) {
        float& of_a = square[i * n + j];
        const float of_decay = -of_a * c.a[i * n + j];
        decay[i] += of_decay;
        decay[j] -= of_decay;
        const float between = c.decay_between(i, j);
        const float product = dot_rows(c.k + i * c.key_size, c.k + j * c.key_size, c.key_size);
        of_beta -= of_a * product * between;
        of_a *= -c.beta[i] * between;
      }
      beta[i] = of_beta;
      std::fill(square + i * n + i, square + (i + 1) * n, 0.0F);
    }
    add_small_product(k, {square, n, 1}, c.k, n, c.key_size, n);
    add_small_product(k, {square, 1, n}, c.k, n, c.key_size, n);
  }

  /// Of R = beta (v - exp(G) k S), but for k's and the state's.
  void add_of_right_side(const DeltaChunk& c) {
    for (int64_t i = 0; i < c.count; ++i) {
      const int64_t at = i * c.value_size;
      const float* of_right = written + at;
      scale_small_row(v + at, c.beta[i], of_right, c.value_size);
      const float kept = std::exp(c.decay[i]);
      const float of_prediction = dot_rows(of_right, c.predicted + at, c.value_size);
      beta[i] += dot_rows(of_right, c.v + at, c.value_size) - kept * of_prediction;
      decay[i] -= c.beta[i] * kept * of_prediction;
    }
  }

  /// Of the state before the chunk, and of q and k that read it.
  void add_of_state(const DeltaChunk& c, const float* state, float* state_grad) {
    const int64_t n = c.count;
    turn_matrix(turned, state, c.key_size, c.value_size);
    scale_small_row(state_grad, c.whole_decay(), state_grad, c.key_size * c.value_size);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = i * c.value_size;
      scale_small_row(scaled + at, std::exp(c.decay[i]), o + at, c.value_size);
    }
    add_small_product(q, {scaled, c.value_size, 1}, turned, n, c.key_size, c.value_size);
    add_small_product(state_grad, {c.q, 1, c.key_size}, scaled, c.key_size, c.value_size, n);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = i * c.value_size;
      scale_small_row(scaled + at, -c.beta[i] * std::exp(c.decay[i]), written + at, c.value_size);
    }
    add_small_product(k, {scaled, c.value_size, 1}, turned, n, c.key_size, c.value_size);
    add_small_product(state_grad, {c.k, 1, c.key_size}, scaled, c.key_size, c.value_size, n);
  }
};

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
