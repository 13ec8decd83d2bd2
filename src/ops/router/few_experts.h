#pragma once

#include <algorithm>

#include "ops/router/router_workspace.h"
#include "ops/simd.h"

/// The router's products where a token has few logits, each by one thread. They are tall and
/// narrow: all threads together take longer to share such a product out than to compute it. BF16
/// rows are widened in registers. T: float or Bf16.
namespace tessera::few_experts {

using simd::kLanes;
using simd::Vec;

/// Rows and experts of a tile, whose sums stay in registers.
constexpr int kLogitRows = 4;
constexpr int kLogitExperts = kLanes == 16 ? 4 : 2;
constexpr int kGradientRows = 8;
constexpr int kGradientExperts = 8;
/// Vectors of columns: with BF16 on AVX-512 two are a line of the cache.
constexpr int kGradientVectors = kLanes == 16 ? 2 : 1;

/// Asks for rows that several of them are read at a time, which processors do not foresee.
template <typename T>
void prefetch(const T* rows, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(rows + i);
}

/// Lanes share out the columns, whatever the tile: a logit depends on its own row alone, and has
/// the bits that gemm_of_rows gives.
template <int kRows, int kExperts, typename T>
void multiply_logits_tile(const T* x, const float* weight, const RouterSizes& s, float* logits) {
  const int64_t stride = s.hidden_size;
  Vec sums[kRows][kExperts] = {};
  simd::for_each_vector(stride, [&](int64_t h, auto lanes) {
    Vec weights[kExperts];
#pragma GCC unroll 8
    for (int e = 0; e < kExperts; ++e) weights[e] = simd::load(weight + e * stride + h, lanes);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vec own = simd::load(x + row * stride + h, lanes);
#pragma GCC unroll 8
      for (int e = 0; e < kExperts; ++e) sums[row][e] += own * weights[e];
    }
  });
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int e = 0; e < kExperts; ++e) logits[row * s.num_experts + e] = simd::sum(sums[row][e]);
  }
}

template <int kRows, typename T>
void multiply_logits_rows(const T* x, const float* weight, const RouterSizes& s, float* logits) {
  int64_t e = 0;
  for (; e + kLogitExperts <= s.num_experts; e += kLogitExperts)
    multiply_logits_tile<kRows, kLogitExperts>(x, weight + e * s.hidden_size, s, logits + e);
  for (; e < s.num_experts; ++e)
    multiply_logits_tile<kRows, 1>(x, weight + e * s.hidden_size, s, logits + e);
}

/// logits [num_rows, E] = x [num_rows, H] · weightᵀ, weight [E, H].
template <typename T>
void multiply_logits(const T* x, const float* weight, int64_t num_rows, const RouterSizes& s,
                     float* logits) {
  int64_t row = 0;
  for (; row + kLogitRows <= num_rows; row += kLogitRows)
    multiply_logits_rows<kLogitRows>(x + row * s.hidden_size, weight, s,
                                     logits + row * s.num_experts);
  for (; row < num_rows; ++row)
    multiply_logits_rows<1>(x + row * s.hidden_size, weight, s, logits + row * s.num_experts);
}

/// grad_x = addend (unless null) + grad_logits · weight, for a vector of columns of kRows rows.
template <int kRows, typename T, typename Lanes>
void write_x_gradient_tile(const float* grad_logits, const float* weight, const RouterSizes& s,
                           const T* addend, T* grad_x, Lanes lanes) {
  Vec sums[kRows] = {};
  for (int64_t e = 0; e < s.num_experts; ++e) {
    const Vec own = simd::load(weight + e * s.hidden_size, lanes);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) sums[row] += own * grad_logits[row * s.num_experts + e];
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const int64_t at = row * s.hidden_size;
    if (addend != nullptr) sums[row] = simd::load(addend + at, lanes) + sums[row];
    simd::store(grad_x + at, sums[row], lanes);
  }
}

/// grad_x [num_rows, H] = addend (unless null, and maybe the same memory) + grad_logits
/// [num_rows, E] · weight.
template <typename T>
void write_x_gradient(const float* grad_logits, const float* weight, int64_t num_rows,
                      const RouterSizes& s, const T* addend, T* grad_x) {
  for (int64_t row = 0; row < num_rows; row += kGradientRows) {
    const float* own = grad_logits + row * s.num_experts;
    const int64_t rows = std::min<int64_t>(kGradientRows, num_rows - row);
    simd::for_each_vector(s.hidden_size, [&](int64_t h, auto lanes) {
      const auto write = [&]<int kRows>(int64_t first) {
        const int64_t at = (row + first) * s.hidden_size + h;
        write_x_gradient_tile<kRows>(own + first * s.num_experts, weight + h, s,
                                     addend == nullptr ? nullptr : addend + at, grad_x + at, lanes);
      };
      if (rows == kGradientRows) return write.template operator()<kGradientRows>(0);
      for (int64_t first = 0; first < rows; ++first) write.template operator()<1>(first);
    });
  }
}

/// sums [kExperts, H] += grad_logitsᵀ · x for kVectors vectors of columns, row after row.
template <int kExperts, int kVectors, typename T, typename Lanes>
void add_weight_gradient_tile(const float* grad_logits, const T* x, int64_t num_rows,
                              const RouterSizes& s, float* sums, Lanes lanes) {
  Vec totals[kExperts][kVectors];
#pragma GCC unroll 8
  for (int e = 0; e < kExperts; ++e) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      totals[e][v] = simd::load(sums + e * s.hidden_size + v * kLanes, lanes);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    Vec own[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      own[v] = simd::load(x + row * s.hidden_size + v * kLanes, lanes);
#pragma GCC unroll 8
    for (int e = 0; e < kExperts; ++e) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        totals[e][v] += own[v] * grad_logits[row * s.num_experts + e];
    }
  }
#pragma GCC unroll 8
  for (int e = 0; e < kExperts; ++e) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      simd::store(sums + e * s.hidden_size + v * kLanes, totals[e][v], lanes);
  }
}

template <int kVectors, typename T, typename Lanes>
void add_weight_gradient_columns(const float* grad_logits, const T* x, int64_t num_rows,
                                 const RouterSizes& s, float* sums, Lanes lanes) {
  int64_t e = 0;
  for (; e + kGradientExperts <= s.num_experts; e += kGradientExperts)
    add_weight_gradient_tile<kGradientExperts, kVectors>(grad_logits + e, x, num_rows, s,
                                                         sums + e * s.hidden_size, lanes);
  for (; e < s.num_experts; ++e)
    add_weight_gradient_tile<1, kVectors>(grad_logits + e, x, num_rows, s, sums + e * s.hidden_size,
                                          lanes);
}

/// sums [E, H] += grad_logitsᵀ · x, of grad_logits [num_rows, E] and x [num_rows, H].
template <typename T>
void add_weight_gradient(const float* grad_logits, const T* x, int64_t num_rows,
                         const RouterSizes& s, float* sums) {
  constexpr int64_t kWide = kGradientVectors * kLanes;
  int64_t h = 0;
  for (; h + kWide <= s.hidden_size; h += kWide)
    add_weight_gradient_columns<kGradientVectors>(grad_logits, x + h, num_rows, s, sums + h,
                                                  simd::Whole{});
  simd::for_each_vector(s.hidden_size - h, [&](int64_t more, auto lanes) {
    add_weight_gradient_columns<1>(grad_logits, x + h + more, num_rows, s, sums + h + more, lanes);
  });
}

}  // namespace tessera::few_experts
