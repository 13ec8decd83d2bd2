#pragma once

#include <cstdint>
#include <span>

#include "core/dtype.h"

/// The vector code of ops/simd.h and ops/activation_math.h for whole arrays, compiled for every CPU
/// level as kernels are: tests run what the level in use has.
namespace tessera::testing {

enum class VectorFunction {
  kExp,
  kReciprocal,  ///< simd::reciprocal_from_one
  kSine,
  kCosine,
  kSilu,
  kSiluSlope,
  kGelu,
  kGeluSlope,
  kGeluTanh,
  kGeluTanhSlope,
  kAddOne
};

/// y[i] = function(x[i]).
void apply_vectors(VectorFunction function, std::span<const float> x, float* y);
/// The same in BF16.
void apply_bf16_vectors(VectorFunction function, std::span<const Bf16> x, Bf16* y);
/// y[i] = function(x[i]) for activations, by Function::value rather than its slope.
void apply_values(VectorFunction function, std::span<const float> x, float* y);

void narrow_vectors(std::span<const float> x, Bf16* y);
void widen_vectors(std::span<const Bf16> x, float* y);

int vector_lanes();
/// The sum and the greatest of the elements of one vector.
float sum_vector(const float* lanes);
float max_vector(const float* lanes);
/// Of whole arrays, a vector at a time and its rest.
float sum_vectors(std::span<const float> x);
float sum_bf16_vectors(std::span<const Bf16> x);

}  // namespace tessera::testing
