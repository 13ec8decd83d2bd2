#include "ops/gemm/testing/vector_functions.h"

#include "ops/activation_math.h"
#include "ops/cpu_dispatch.h"
#include "ops/simd.h"

namespace tessera::testing {
namespace {

using simd::Vec;

Vec apply(VectorFunction function, Vec x) {
  switch (function) {
    case VectorFunction::kExp:
      return simd::exp(x);
    case VectorFunction::kReciprocal:
      return simd::reciprocal_from_one(x);
    case VectorFunction::kSine:
      return simd::sincos(x).sine;
    case VectorFunction::kCosine:
      return simd::sincos(x).cosine;
    case VectorFunction::kSilu:
      return Silu::slope(x).value;
    case VectorFunction::kSiluSlope:
      return Silu::slope(x).derivative;
    case VectorFunction::kGelu:
      return Gelu::slope(x).value;
    case VectorFunction::kGeluSlope:
      return Gelu::slope(x).derivative;
    case VectorFunction::kGeluTanh:
      return GeluTanh::slope(x).value;
    case VectorFunction::kGeluTanhSlope:
      return GeluTanh::slope(x).derivative;
    case VectorFunction::kAddOne:
      return x + 1.0F;
  }
  return x;
}

Vec value_of(VectorFunction function, Vec x) {
  switch (function) {
    case VectorFunction::kSilu:
      return Silu::value(x);
    case VectorFunction::kGelu:
      return Gelu::value(x);
    default:
      return GeluTanh::value(x);
  }
}

template <typename T>
float sum_elements(std::span<const T> x) {
  float total = 0;
  simd::for_each_vector(std::ssize(x), [&](int64_t i, auto lanes) {
    total += simd::sum(simd::load(x.data() + i, lanes));
  });
  return total;
}

}  // namespace

TESSERA_LEVELED(void, apply_vectors, (VectorFunction function, std::span<const float> x, float* y),
                (function, x, y)) {
  simd::for_each_vector(std::ssize(x), [&](int64_t i, auto lanes) {
    simd::store(y + i, apply(function, simd::load(x.data() + i, lanes)), lanes);
  });
}

TESSERA_LEVELED(void, apply_bf16_vectors,
                (VectorFunction function, std::span<const Bf16> x, Bf16* y), (function, x, y)) {
  simd::for_each_vector(std::ssize(x), [&](int64_t i, auto lanes) {
    simd::store(y + i, apply(function, simd::load(x.data() + i, lanes)), lanes);
  });
}

TESSERA_LEVELED(void, apply_values, (VectorFunction function, std::span<const float> x, float* y),
                (function, x, y)) {
  simd::for_each_vector(std::ssize(x), [&](int64_t i, auto lanes) {
    simd::store(y + i, value_of(function, simd::load(x.data() + i, lanes)), lanes);
  });
}

TESSERA_LEVELED(void, narrow_vectors, (std::span<const float> x, Bf16* y), (x, y)) {
  simd::convert(y, x.data(), std::ssize(x));
}

TESSERA_LEVELED(void, widen_vectors, (std::span<const Bf16> x, float* y), (x, y)) {
  simd::convert(y, x.data(), std::ssize(x));
}

TESSERA_LEVELED(int, vector_lanes, (), ()) {
  return simd::kLanes;
}

TESSERA_LEVELED(float, sum_vector, (const float* lanes), (lanes)) {
  return simd::sum(simd::load(lanes));
}

TESSERA_LEVELED(float, max_vector, (const float* lanes), (lanes)) {
  return simd::max(simd::load(lanes));
}

TESSERA_LEVELED(float, sum_vectors, (std::span<const float> x), (x)) {
  return sum_elements(x);
}

TESSERA_LEVELED(float, sum_bf16_vectors, (std::span<const Bf16> x), (x)) {
  return sum_elements(x);
}

}  // namespace tessera::testing
