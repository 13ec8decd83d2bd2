#pragma once

#include <algorithm>
#include <cmath>

#include "ops/gated_delta/small_product.h"
#include "ops/kda/kda.h"
#include "ops/workspace.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

// Kimi Delta Attention over a chunk of C tokens with the state S [Dk, Dv] before them. With G_i
// [Dk] the running sums of g within the chunk, products of vectors element by element, and D [C,
// Dv] what each token writes, beta_i (v_i - its prediction):
//   (I + diag(beta) A) D = R,  A_ij = sum of k_i k_j exp(G_i - G_j) for j < i,
//   R_i = beta_i (v_i - (k_i exp(G_i)) S)
//   o_i = (q_i exp(G_i)) S + sum over j <= i of P_ij D_j,  P_ij = sum of q_i k_j exp(G_i - G_j)
//   S' = diag(exp(G_C)) S + sum over j of (k_j exp(G_C - G_j))ᵀ D_j
// Factors between tokens are products of exp(g), none of which is above 1: exp(-G_j) by itself,
// which would make A and P products of matrices, overflows where decays are strong.

/// to = a · b, element by element.
inline void multiply_rows(float* to, const float* a, const float* b, int64_t n) {
  simd::for_each_vector(n, [&](int64_t i, auto lanes) {
    simd::store(to + i, simd::load(a + i, lanes) * simd::load(b + i, lanes), lanes);
  });
}

/// What one chunk of one head is made of.
struct KdaChunk {
  int64_t key_size = 0;
  int64_t value_size = 0;
  int64_t count = 0;  ///< tokens, at most kKdaChunk

  float* q = nullptr;          // [C, Dk] unit vectors over sqrt(Dk)
  float* k = nullptr;          // [C, Dk] unit vectors
  float* step = nullptr;       // [C, Dk] exp(g_i)
  float* kept = nullptr;       // [C, Dk] exp(G_i)
  float* rest = nullptr;       // [C, Dk] exp(G_C - G_j)
  float* q_kept = nullptr;     // [C, Dk] q exp(G_i)
  float* k_kept = nullptr;     // [C, Dk] k exp(G_i)
  float* k_rest = nullptr;     // [C, Dk] k exp(G_C - G_j)
  float* decayed = nullptr;    // [Dk] k_j exp(G_i - G_j) of a pair
  float* v = nullptr;          // [C, Dv]
  float* predicted = nullptr;  // [C, Dv]
  float* written = nullptr;    // [C, Dv] D
  float* a = nullptr;          // [C, C], 0 from the diagonal on
  float* p = nullptr;          // [C, C], 0 behind the diagonal
  float* beta = nullptr;       // [C]
  float* q_inverse = nullptr;  // [C] 1 / |q| before
  float* k_inverse = nullptr;  // [C]

  static KdaChunk place(const KdaSpec& spec, WorkspaceLayout& layout, std::span<std::byte> memory) {
    KdaChunk c{.key_size = spec.key_size, .value_size = spec.value_size};
    const auto place_all = [&](std::initializer_list<float**> parts, int64_t size) {
      for (float** part : parts) *part = workspace_part<float>(memory, layout.add<float>(size));
    };
    place_all({&c.q, &c.k, &c.step, &c.kept, &c.rest, &c.q_kept, &c.k_kept, &c.k_rest},
              kKdaChunk * spec.key_size);
    place_all({&c.decayed}, spec.key_size);
    place_all({&c.v, &c.predicted, &c.written}, kKdaChunk * spec.value_size);
    place_all({&c.a, &c.p}, kKdaChunk * kKdaChunk);
    place_all({&c.beta, &c.q_inverse, &c.k_inverse}, kKdaChunk);
    return c;
  }

  /// exp(G_C) [Dk].
  const float* whole_decay() const { return kept + (count - 1) * key_size; }

  /// Decays between tokens and the chunk's ends. REQUIRES q, k, step and count.
  void decay_keys() {
    const int64_t n = key_size;
    const int64_t last = (count - 1) * n;
    std::copy_n(step, n, kept);
    for (int64_t at = n; at <= last; at += n) multiply_rows(kept + at, kept + at - n, step + at, n);
    std::fill_n(rest + last, n, 1.0F);
    for (int64_t at = last - n; at >= 0; at -= n)
      multiply_rows(rest + at, rest + at + n, step + at + n, n);
    multiply_rows(q_kept, q, kept, count * n);
    multiply_rows(k_kept, k, kept, count * n);
    multiply_rows(k_rest, k, rest, count * n);
  }

  /// A, and P where it is wanted. REQUIRES decay_keys().
  template <bool kQueries>
  void compare() {
    std::fill_n(a, count * count, 0.0F);
    if (kQueries) std::fill_n(p, count * count, 0.0F);
    for (int64_t j = 0; j < count; ++j) {
      std::copy_n(k + j * key_size, key_size, decayed);
      if (kQueries) p[j * count + j] = dot_rows(q + j * key_size, decayed, key_size);
      for (int64_t i = j + 1; i < count; ++i) compare_pair<kQueries>(i, j);
    }
  }

  /// D. REQUIRES compare(), v and beta.
  void solve(const float* state) {
    std::fill_n(predicted, count * value_size, 0.0F);
    add_small_product(predicted, {k_kept, key_size, 1}, state, count, value_size, key_size);
    for (int64_t i = 0; i < count; ++i) {
      float* row = written + i * value_size;
      scale_small_row(row, beta[i], v + i * value_size, value_size);
      add_scaled_row(row, -beta[i], predicted + i * value_size, value_size);
      for (int64_t j = 0; j < i; ++j)
        add_scaled_row(row, -beta[i] * a[i * count + j], written + j * value_size, value_size);
    }
  }

  /// o [C, Dv]. REQUIRES compare() with queries, and solve().
  void write_outputs(const float* state, float* o) const {
    std::fill_n(o, count * value_size, 0.0F);
    add_small_product(o, {q_kept, key_size, 1}, state, count, value_size, key_size);
    add_small_product(o, {p, count, 1}, written, count, value_size, count);
  }

  /// The state behind the chunk. REQUIRES solve().
  void advance(float* state) const {
    for (int64_t i = 0; i < key_size; ++i) {
      float* row = state + i * value_size;
      scale_small_row(row, whole_decay()[i], row, value_size);
    }
    add_small_product(state, {k_rest, 1, key_size}, written, key_size, value_size, count);
  }

 private:
  /// Moves the decayed k_j on to token i.
  template <bool kQueries>
  void compare_pair(int64_t i, int64_t j) {
    simd::Vec of_key{};
    simd::Vec of_query{};
    const int64_t at = i * key_size;
    simd::for_each_vector(key_size, [&](int64_t e, auto lanes) {
      const simd::Vec x = simd::load(decayed + e, lanes) * simd::load(step + at + e, lanes);
      simd::store(decayed + e, x, lanes);
      of_key += x * simd::load(k + at + e, lanes);
      if (kQueries) of_query += x * simd::load(q + at + e, lanes);
    });
    a[i * count + j] = simd::sum(of_key);
    if (kQueries) p[i * count + j] = simd::sum(of_query);
  }
};

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
