#pragma once

#include "ops/kda/kda_chunk.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

/// Gradients of one chunk's values, from those of its outputs and of the state behind it
/// (kda_chunk.h has the names). Whatever reads exp(G_i) reads it times q_i or k_i, and what reads
/// exp(-G_j) times k_j: so the gradient of G_i is q_i times its own gradient plus k_i times the
/// difference of its gradients as a reader and as a writer.
struct KdaChunkGrads {
  float* o = nullptr;        // [C, Dv], given
  float* q = nullptr;        // [C, Dk]
  float* k = nullptr;        // [C, Dk]; of a key as it reads, then of both
  float* k_write = nullptr;  // [C, Dk]; as it writes
  float* decay = nullptr;    // [C, Dk]; of G, then of g
  float* factor = nullptr;   // [Dk] exp(G_i - G_j) of a pair
  float* last = nullptr;     // [Dk] of G_C, through the state behind
  float* v = nullptr;        // [C, Dv]
  float* written = nullptr;  // [C, Dv]; then of R
  float* scaled = nullptr;   // [C, Dv]
  float* turned = nullptr;   // [Dv, max(C, Dk)]
  float* of_a = nullptr;     // [C, C]
  float* of_p = nullptr;     // [C, C]
  float* beta = nullptr;     // [C]

  static KdaChunkGrads place(const KdaSpec& spec, WorkspaceLayout& layout,
                             std::span<std::byte> memory) {
    KdaChunkGrads g;
    const auto place_all = [&](std::initializer_list<float**> parts, int64_t size) {
      for (float** part : parts) *part = workspace_part<float>(memory, layout.add<float>(size));
    };
    place_all({&g.q, &g.k, &g.k_write, &g.decay}, kKdaChunk * spec.key_size);
    place_all({&g.factor, &g.last}, spec.key_size);
    place_all({&g.o, &g.v, &g.written, &g.scaled}, kKdaChunk * spec.value_size);
    place_all({&g.turned}, spec.value_size * std::max(kKdaChunk, spec.key_size));
    place_all({&g.of_a, &g.of_p}, kKdaChunk * kKdaChunk);
    place_all({&g.beta}, kKdaChunk);
    return g;
  }

  /// `state_grad` [Dk, Dv] is that of the state behind the chunk, and becomes that of the state
  /// before it. REQUIRES c.solve() with `state` behind c.compare() with queries, and o.
  void run(const KdaChunk& c, const float* state, float* state_grad) {
    add_of_new_state(c, state, state_grad);
    add_of_outputs(c);
    solve_transposed(c);
    add_of_right_side(c);
    add_of_state(c, state, state_grad);
    decay_all(c);
    add_of_pairs(c);
    join(c);
  }

 private:
  void add_of_new_state(const KdaChunk& c, const float* state, const float* state_grad) {
    const int64_t n = c.count;
    const int64_t keys = c.key_size;
    const int64_t values = c.value_size;
    std::fill_n(written, n * values, 0.0F);
    add_small_product(written, {c.k_rest, keys, 1}, state_grad, n, values, keys);
    turn_matrix(turned, state_grad, keys, values);
    std::fill_n(k_write, n * keys, 0.0F);
    add_small_product(k_write, {c.written, values, 1}, turned, n, keys, values);
    for (int64_t i = 0; i < keys; ++i)
      last[i] = c.whole_decay()[i] * dot_rows(state + i * values, state_grad + i * values, values);
    for (int64_t j = 0; j < n; ++j)
      add_products(last, c.k_rest + j * keys, k_write + j * keys, keys);
  }

  /// Of P, and of D in P D.
  void add_of_outputs(const KdaChunk& c) {
    const int64_t n = c.count;
    add_small_product(written, {c.p, 1, n}, o, n, c.value_size, n);
    turn_matrix(turned, c.written, n, c.value_size);
    std::fill_n(of_p, n * n, 0.0F);
    add_small_product(of_p, {o, c.value_size, 1}, turned, n, n, c.value_size);
  }

  /// From the gradient of D that of R: the transposed matrix has ones on its diagonal too.
  void solve_transposed(const KdaChunk& c) {
    for (int64_t i = c.count - 1; i > 0; --i) {
      for (int64_t j = 0; j < i; ++j)
        add_scaled_row(written + j * c.value_size, -c.beta[i] * c.a[i * c.count + j],
                       written + i * c.value_size, c.value_size);
    }
  }

  /// Of R = beta (v - prediction) and of A, whose gradient is -beta (that of R) Dᵀ. REQUIRES D in
  /// `turned`.
  void add_of_right_side(const KdaChunk& c) {
    const int64_t n = c.count;
    std::fill_n(of_a, n * n, 0.0F);
    add_small_product(of_a, {written, c.value_size, 1}, turned, n, n, c.value_size);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = i * c.value_size;
      const float* of_right = written + at;
      float of_beta = dot_rows(of_right, c.v + at, c.value_size) -
                      dot_rows(of_right, c.predicted + at, c.value_size);
      for (int64_t j = 0; j < i; ++j) {
        of_beta -= of_a[i * n + j] * c.a[i * n + j];
        of_a[i * n + j] *= -c.beta[i];
      }
      beta[i] = of_beta;
      scale_small_row(v + at, c.beta[i], of_right, c.value_size);
      scale_small_row(scaled + at, -c.beta[i], of_right, c.value_size);
    }
  }

  /// Of the state before the chunk, and of q exp(G) and k exp(G) that read it.
  void add_of_state(const KdaChunk& c, const float* state, float* state_grad) {
    const int64_t n = c.count;
    const int64_t keys = c.key_size;
    const int64_t values = c.value_size;
    turn_matrix(turned, state, keys, values);
    std::fill_n(q, n * keys, 0.0F);
    std::fill_n(k, n * keys, 0.0F);
    add_small_product(q, {o, values, 1}, turned, n, keys, values);
    add_small_product(k, {scaled, values, 1}, turned, n, keys, values);
    for (int64_t i = 0; i < keys; ++i) {
      float* row = state_grad + i * values;
      scale_small_row(row, c.whole_decay()[i], row, values);
    }
    add_small_product(state_grad, {c.q_kept, 1, keys}, o, keys, values, n);
    add_small_product(state_grad, {c.k_kept, 1, keys}, scaled, keys, values, n);
  }

  /// From gradients of q exp(G), k exp(G) and k exp(G_C - G) those of q and k.
  void decay_all(const KdaChunk& c) {
    multiply_rows(q, q, c.kept, c.count * c.key_size);
    multiply_rows(k, k, c.kept, c.count * c.key_size);
    multiply_rows(k_write, k_write, c.rest, c.count * c.key_size);
  }

  /// Of q and k through A and P.
  void add_of_pairs(const KdaChunk& c) {
    for (int64_t j = 0; j < c.count; ++j) {
      const int64_t at = j * c.key_size;
      const float of_itself = of_p[j * c.count + j];
      add_scaled_row(q + at, of_itself, c.k + at, c.key_size);
      add_scaled_row(k_write + at, of_itself, c.q + at, c.key_size);
      std::fill_n(factor, c.key_size, 1.0F);
      for (int64_t i = j + 1; i < c.count; ++i) add_of_pair(c, i, j);
    }
  }

  void add_of_pair(const KdaChunk& c, int64_t i, int64_t j) {
    const float by_query = of_p[i * c.count + j];
    const float by_key = of_a[i * c.count + j];
    const int64_t reads = i * c.key_size;
    const int64_t writes = j * c.key_size;
    simd::for_each_vector(c.key_size, [&](int64_t e, auto lanes) {
      const simd::Vec f = simd::load(factor + e, lanes) * simd::load(c.step + reads + e, lanes);
      simd::store(factor + e, f, lanes);
      const simd::Vec key = f * simd::load(c.k + writes + e, lanes);
      const simd::Vec of_factor = by_query * simd::load(c.q + reads + e, lanes) +
                                  by_key * simd::load(c.k + reads + e, lanes);
      simd::store(q + reads + e, simd::load(q + reads + e, lanes) + by_query * key, lanes);
      simd::store(k + reads + e, simd::load(k + reads + e, lanes) + by_key * key, lanes);
      simd::store(k_write + writes + e, simd::load(k_write + writes + e, lanes) + f * of_factor,
                  lanes);
    });
  }

  /// Of k in both its parts, and of g: sums of those of G from a token on.
  void join(const KdaChunk& c) {
    const int64_t keys = c.key_size;
    for (int64_t i = c.count - 1; i >= 0; --i) {
      const int64_t at = i * keys;
      simd::for_each_vector(keys, [&](int64_t e, auto lanes) {
        const simd::Vec read = simd::load(k + at + e, lanes);
        const simd::Vec write = simd::load(k_write + at + e, lanes);
        const simd::Vec sum = simd::load(last + e, lanes) +
                              simd::load(c.q + at + e, lanes) * simd::load(q + at + e, lanes) +
                              simd::load(c.k + at + e, lanes) * (read - write);
        simd::store(last + e, sum, lanes);
        simd::store(decay + at + e, sum, lanes);
        simd::store(k + at + e, read + write, lanes);
      });
    }
  }

  /// to += a · b, element by element.
  static void add_products(float* to, const float* a, const float* b, int64_t n) {
    simd::for_each_vector(n, [&](int64_t i, auto lanes) {
      simd::store(to + i,
                  simd::load(to + i, lanes) + simd::load(a + i, lanes) * simd::load(b + i, lanes),
                  lanes);
    });
  }
};

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
