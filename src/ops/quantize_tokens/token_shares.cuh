#pragma once

#include "ops/quantize_tokens/token_parts.cuh"

/// Parts of FP8 in F16, two columns an instruction: what codes stand for times powers of two, which
/// are what their scales are. Exact where scales are near each other; where they are not, who uses
/// this is told.
namespace tessera::cuda {
namespace token_parts {

/// 2^e twice, as a pair of F16, is (e + kHalfBias) · kHalfPowers for e from -14 to 15.
constexpr uint32_t kHalfPowers = 0x04000400;
constexpr uint32_t kHalfBias = 15;

/// What the codes of four columns stand for, but for their scale.
template <Tokens kTokensOf>
__device__ __forceinline__ void decode_halves(uint32_t codes, __half2 (&to)[2]) {
  auto& words = reinterpret_cast<uint32_t(&)[2]>(to);
  if constexpr (kTokensOf == Tokens::kE4m3) {
    asm("{.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(words[0]), "=r"(words[1])
        : "r"(codes));
  } else {
    asm("{.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e5m2x2 %0, low;\n"
        "cvt.rn.f16x2.e5m2x2 %1, high;}"
        : "=r"(words[0]), "=r"(words[1])
        : "r"(codes));
  }
}

/// A thread's values of FP8 over the largest of their scales, which are powers of two, in F16:
/// exact where the scales are so near that no digit of F16 is lost.
template <Tokens kTokensOf>
struct Shares {
  /// The last digit of E4M3 is worth 2^-9 or more, of E5M2 2^-16, of F16 2^-24.
  static constexpr uint32_t kMostHalvings = kTokensOf == Tokens::kE4m3 ? 14 : 8;

  float largest;
  bool are_exact = true;
  __half2 of_rows[kRows];

  __device__ __forceinline__ explicit Shares(const Part<kTokensOf>& part) {
    static_assert(kRows == 4);
    largest = fmaxf(fmaxf(part.scales[0], part.scales[1]), fmaxf(part.scales[2], part.scales[3]));
    uint32_t halvings[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      halvings[r] = (__float_as_uint(largest) - __float_as_uint(part.scales[r])) >> 23;
      are_exact = are_exact && halvings[r] <= kMostHalvings;
      reinterpret_cast<uint32_t&>(of_rows[r]) = (kHalfBias - halvings[r]) * kHalfPowers;
    }
    if (!are_exact) leave_zeros_out(part, halvings);
  }

  /// Of four columns.
  __device__ __forceinline__ void decode(uint32_t codes, int row, __half2 (&to)[2]) const {
    decode_halves<kTokensOf>(codes, to);
#pragma unroll
    for (__half2& two : to) two = __hmul2(two, of_rows[row]);
  }

 private:
  /// Tokens of zeros have the least scale that there is.
  __device__ __forceinline__ void leave_zeros_out(const Part<kTokensOf>& part,
                                                  const uint32_t (&halvings)[kRows]) {
    are_exact = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (halvings[r] <= kMostHalvings) continue;
      are_exact = are_exact && !part.has_values(r);
      of_rows[r] = __half2(0, 0);
    }
  }
};

/// What columns are multiplied by, and the exponents of their scales.
template <Tokens kTokensOf>
struct Factors {
  alignas(16) float of[kColumns<kTokensOf>];
  alignas(16) uint16_t exponents[kIsCoded<kTokensOf> ? kColumns<kTokensOf> : 8];
};

/// Of the largest values that threads have; the scales are written to `scales`, where that is not
/// null, of which `num_columns` are left.
template <Tokens kTokensOf>
__device__ __forceinline__ void share_factors(float largest, Factors<kTokensOf>& factors,
                                              float* scales, int64_t num_columns) {
  if (threadIdx.x < kColumns<kTokensOf>) {
    const float scale = scale_for<true>(largest);
    factors.of[threadIdx.x] = __frcp_rn(scale);
    if constexpr (kIsCoded<kTokensOf>) {
      // Columns of zeros, whose scales are the least there are, take a neighbour's.
      const uint32_t own = __float_as_uint(scale) >> 23;
      const uint32_t most = __reduce_max_sync(~0U, largest > 0 ? own : 0);
      factors.exponents[threadIdx.x] = static_cast<uint16_t>(largest > 0 ? own : most);
    }
    if (scales != nullptr && threadIdx.x < num_columns) scales[threadIdx.x] = scale;
  }
  __syncthreads();
}

/// A thread's columns: the powers of two between their scales and those of shares of tokens.
template <Tokens kTokensOf>
class Powers {
 public:
  static constexpr int kWords = kWidth<kTokensOf> / 2;
  using Words = uint32_t[kWords];

  __device__ __forceinline__ explicit Powers(const Factors<kTokensOf>& factors)
      : exponents_(reinterpret_cast<const uint4*>(factors.exponents + own_column<kTokensOf>())) {
    Words words;
    load(words);
    uint32_t least = words[0];
    uint32_t most = words[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      least = __vminu2(least, words[i]);
      most = __vmaxu2(most, words[i]);
    }
    least_ = static_cast<int>(min(least & 0xFFFFU, least >> 16));
    most_ = static_cast<int>(max(most & 0xFFFFU, most >> 16));
  }

  /// As pairs of F16, or whether there are none: a part without values takes any.
  __device__ __forceinline__ bool find(const Part<kTokensOf>& part, const Shares<kTokensOf>& shares,
                                       Words& powers) const {
    const int exponent = static_cast<int>(__float_as_uint(shares.largest) >> 23);
    bool are_powers = shares.are_exact && exponent - most_ >= -14 && exponent - least_ <= 15;
    uint32_t base = (static_cast<uint32_t>(exponent) + kHalfBias) * kHalfPowers;
    uint32_t step = kHalfPowers & 0xFFFFU;
    if (!are_powers) {
      are_powers =
          !part.has_values(0) && !part.has_values(1) && !part.has_values(2) && !part.has_values(3);
      base = kHalfBias * kHalfPowers;
      step = 0;
    }
    Words words;
    load(words);
#pragma unroll
    for (int i = 0; i < kWords; ++i) powers[i] = base - words[i] * step;
    return are_powers;
  }

 private:
  __device__ __forceinline__ void load(Words& words) const {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) reinterpret_cast<uint4*>(words)[i] = exponents_[i];
  }

  const uint4* exponents_;
  int least_;
  int most_;
};
template <Tokens kTokensOf>
requires(!kIsCoded<kTokensOf>) class Powers<kTokensOf> {
 public:
  __device__ __forceinline__ explicit Powers(const Factors<kTokensOf>& /*factors*/) {}
};

}  // namespace token_parts
}  // namespace tessera::cuda
