#pragma once

#include <algorithm>
#include <cmath>

#include "ops/gated_delta/gated_delta.h"
#include "ops/gated_delta/small_product.h"
#include "ops/workspace.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

// The gated delta rule over a chunk of C tokens with the state S [Dk, Dv] before them (turned, so
// that values are neighbours). With G the running sums of g within the chunk, E_ij = exp(G_i - G_j)
// and D [C, Dv] what each token writes, beta_i (v_i - its prediction):
//   (I + A) D = R,  A_ij = beta_i k_i·k_j E_ij for j < i,  R_i = beta_i (v_i - exp(G_i) k_i S)
//   o_i = exp(G_i) q_i S + sum over j <= i of P_ij D_j,    P_ij = q_i·k_j E_ij
//   S' = exp(G_C) S + sum over j of exp(G_C - G_j) k_jᵀ D_j
// (Gated Delta Networks, section 3.3, where D is U - W S).

/// What one chunk of one value head is made of.
struct DeltaChunk {
  int64_t key_size = 0;
  int64_t value_size = 0;
  int64_t count = 0;  ///< tokens, at most kDeltaChunk

  float* q = nullptr;          // [C, Dk] unit vectors over sqrt(Dk)
  float* k = nullptr;          // [C, Dk] unit vectors
  float* k_turned = nullptr;   // [Dk, C]
  float* k_decayed = nullptr;  // [C, Dk] exp(G_C - G_j) k_j
  float* v = nullptr;          // [C, Dv]
  float* predicted = nullptr;  // [C, Dv] k S
  float* written = nullptr;    // [C, Dv] D
  float* q_state = nullptr;    // [C, Dv] q S
  float* a = nullptr;          // [C, C]
  float* p = nullptr;          // [C, C]
  float* decay = nullptr;      // [C] G
  float* beta = nullptr;       // [C]
  float* q_inverse = nullptr;  // [C] 1 / |q| before
  float* k_inverse = nullptr;  // [C]

  static DeltaChunk place(const GatedDeltaSpec& spec, WorkspaceLayout& layout,
                          std::span<std::byte> memory) {
    const int64_t keys = kDeltaChunk * spec.key_size;
    const int64_t values = kDeltaChunk * spec.value_size;
    const int64_t squares = kDeltaChunk * kDeltaChunk;
    DeltaChunk chunk{.key_size = spec.key_size, .value_size = spec.value_size};
    for (float** part : {&chunk.q, &chunk.k, &chunk.k_turned, &chunk.k_decayed})
      *part = workspace_part<float>(memory, layout.add<float>(keys));
    for (float** part : {&chunk.v, &chunk.predicted, &chunk.written, &chunk.q_state})
      *part = workspace_part<float>(memory, layout.add<float>(values));
    for (float** part : {&chunk.a, &chunk.p})
      *part = workspace_part<float>(memory, layout.add<float>(squares));
    for (float** part : {&chunk.decay, &chunk.beta, &chunk.q_inverse, &chunk.k_inverse})
      *part = workspace_part<float>(memory, layout.add<float>(kDeltaChunk));
    return chunk;
  }

  /// exp(G_i - G_j).
  float decay_between(int64_t i, int64_t j) const { return std::exp(decay[i] - decay[j]); }
  float whole_decay() const { return std::exp(decay[count - 1]); }

  /// All but q S and what follows from it. REQUIRES q, k, v, decay, beta and count.
  void solve(const float* state) {
    turn_matrix(k_turned, k, count, key_size);
    std::fill_n(a, count * count, 0.0F);
    add_small_product(a, {k, key_size, 1}, k_turned, count, count, key_size);
    std::fill_n(predicted, count * value_size, 0.0F);
    add_small_product(predicted, {k, key_size, 1}, state, count, value_size, key_size);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < i; ++j) a[i * count + j] *= beta[i] * decay_between(i, j);
      std::fill(a + i * count + i, a + (i + 1) * count, 0.0F);
      float* row = written + i * value_size;
      scale_small_row(row, beta[i], v + i * value_size, value_size);
      add_scaled_row(row, -beta[i] * std::exp(decay[i]), predicted + i * value_size, value_size);
      for (int64_t j = 0; j < i; ++j)
        add_scaled_row(row, -a[i * count + j], written + j * value_size, value_size);
      scale_small_row(k_decayed + i * key_size, decay_between(count - 1, i), k + i * key_size,
                      key_size);
    }
  }

  /// P and q S. REQUIRES solve().
  void query(const float* state) {
    std::fill_n(p, count * count, 0.0F);
    add_small_product(p, {q, key_size, 1}, k_turned, count, count, key_size);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j <= i; ++j) p[i * count + j] *= decay_between(i, j);
      std::fill(p + i * count + i + 1, p + (i + 1) * count, 0.0F);
    }
    std::fill_n(q_state, count * value_size, 0.0F);
    add_small_product(q_state, {q, key_size, 1}, state, count, value_size, key_size);
  }

  /// o [C, Dv]. REQUIRES query().
  void write_outputs(float* o) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = i * value_size;
      scale_small_row(o + at, std::exp(decay[i]), q_state + at, value_size);
    }
    add_small_product(o, {p, count, 1}, written, count, value_size, count);
  }

  /// The state behind the chunk. REQUIRES solve().
  void advance(float* state) const {
    scale_small_row(state, whole_decay(), state, key_size * value_size);
    add_small_product(state, {k_decayed, 1, key_size}, written, key_size, value_size, count);
  }
};

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
