#pragma once

#include <cuda_runtime.h>

#include "ops/activation_kind.h"

/// The functions of ops/activation_math.h on the device.
namespace tessera::cuda {

/// A function's value and derivative.
struct Slope {
  float value;
  float derivative;
};

/// 1 / (1 + e^-x), within a few units of the last place.
__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0F, 1.0F + __expf(-x));
}

/// The other factor of a gated activation as it is.
struct PlainOther {
  static __device__ __forceinline__ float other(float up) { return up; }
  /// The gradient of `up` where `grad` is that of the factor.
  static __device__ __forceinline__ float other_grad(float /*up*/, float grad) { return grad; }
};

/// x · sigmoid(x).
struct Silu : PlainOther {
  static __device__ __forceinline__ float value(float x) { return x * sigmoid(x); }
  static __device__ __forceinline__ Slope slope(float x) {
    const float s = sigmoid(x);
    return {x * s, s * (1.0F + x * (1.0F - s))};
  }
};

/// x · Φ(x), by the host's approximation of Φ.
struct Gelu : PlainOther {
  static __device__ __forceinline__ float value(float x) { return x * parts(x).distribution; }
  static __device__ __forceinline__ Slope slope(float x) {
    const Parts p = parts(x);
    constexpr float kInverseSqrtTwoPi = 0.398942280401432678F;
    return {x * p.distribution, p.distribution + x * (p.exponential * kInverseSqrtTwoPi)};
  }

 private:
  struct Parts {
    float distribution;  ///< Φ(x)
    float exponential;   ///< e^(-x²/2)
  };

  static __device__ __forceinline__ Parts parts(float x) {
    const float t = __fdividef(1.0F, 1.0F + 0.35F * fabsf(x));
    float p = t * -0.029146058F + 0.1439723F;
    p = p * t - 0.25571546F;
    p = p * t + 0.15917549F;
    p = p * t - 0.023110699F;
    p = p * t + 0.10550835F;
    p = p * t + 0.119832784F;
    p = p * t + 0.13986188F;
    p = p * t + 0.1396214F;
    const float exponential = __expf(-0.5F * x * x);
    const float tail = exponential * (t * p);
    return {x < 0.0F ? tail : 1.0F - tail, exponential};
  }
};

/// GELU's tanh approximation.
struct GeluTanh : PlainOther {
  static __device__ __forceinline__ float value(float x) { return x * sigmoid(twice_u(x)); }
  static __device__ __forceinline__ Slope slope(float x) {
    const float s = sigmoid(twice_u(x));
    const float du = kTwiceSqrtTwoOverPi * (1.0F + 3.0F * kCubic * x * x);
    return {x * s, s + x * s * (1.0F - s) * du};
  }

 private:
  static constexpr float kTwiceSqrtTwoOverPi = 1.59576912160573081F;
  static constexpr float kCubic = 0.044715F;
  static __device__ __forceinline__ float twice_u(float x) {
    return kTwiceSqrtTwoOverPi * x * (1.0F + kCubic * x * x);
  }
};

/// Of Activation::kSwiGLUOai or kSwiGLUClamped.
struct ClampedSilu {
  ClampConstants c;

  __device__ __forceinline__ float value(float gate) const {
    const float x = clamped(gate);
    return x * sigmoid(c.gain * x);
  }
  __device__ __forceinline__ Slope slope(float gate) const {
    const float x = clamped(gate);
    const float s = sigmoid(c.gain * x);
    const float derivative = s * (1.0F + c.gain * x * (1.0F - s));
    return {x * s, gate > c.limit ? 0.0F : derivative};
  }
  __device__ __forceinline__ float other(float up) const {
    const float below = clamped(up);
    return (below < -c.limit ? -c.limit : below) + c.offset;
  }
  __device__ __forceinline__ float other_grad(float up, float grad) const {
    return up > c.limit || up < -c.limit ? 0.0F : grad;
  }
  /// NaN stays, unlike with fminf.
  __device__ __forceinline__ float clamped(float x) const { return x > c.limit ? c.limit : x; }
};

/// max(x, 0)².
struct SquaredRelu : PlainOther {
  static __device__ __forceinline__ float value(float x) { return positive(x) * positive(x); }
  static __device__ __forceinline__ Slope slope(float x) { return {value(x), 2.0F * positive(x)}; }

 private:
  /// NaN stays, unlike with fmaxf.
  static __device__ __forceinline__ float positive(float x) { return x < 0.0F ? 0.0F : x; }
};

/// Calls run.operator()<kGated>(function) for the activation: with Silu{}, ClampedSilu{...} and so
/// on, which a kernel takes as a parameter.
template <typename Run>
void with_activation(const ActivationFunction& function, Run run) {
  switch (function.kind) {
    case Activation::kSwiGLU:
      return run.template operator()<true>(Silu{});
    case Activation::kGeGLU:
      return run.template operator()<true>(Gelu{});
    case Activation::kGeGLUTanh:
      return run.template operator()<true>(GeluTanh{});
    case Activation::kSwiGLUOai:
    case Activation::kSwiGLUClamped:
      return run.template operator()<true>(ClampedSilu{clamp_of(function)});
    case Activation::kGelu:
      return run.template operator()<false>(Gelu{});
    case Activation::kGeluTanh:
      return run.template operator()<false>(GeluTanh{});
    case Activation::kRelu2:
      return run.template operator()<false>(SquaredRelu{});
  }
}

}  // namespace tessera::cuda
