#pragma once

#include "core/error.h"
#include "ops/activation_kind.h"
#include "ops/simd.h"

namespace tessera {

/// A function's value and derivative at each lane.
struct Slope {
  simd::Vec value;
  simd::Vec derivative;
};

/// The other factor of a gated activation as it is.
struct PlainOther {
  static simd::Vec other(simd::Vec up) { return up; }
  /// The gradient of `up` where `grad` is that of the factor.
  static simd::Vec other_grad(simd::Vec /*up*/, simd::Vec grad) { return grad; }
};

/// x · sigmoid(x).
struct Silu : PlainOther {
  static simd::Vec value(simd::Vec x) { return x * simd::sigmoid(x); }
  static Slope slope(simd::Vec x) {
    const simd::Vec s = simd::sigmoid(x);
    return {x * s, s * (1.0F + x * (1.0F - s))};
  }
};

/// x · Φ(x). Φ(-|x|) = e^(-x²/2) · t P(t) with t = 1 / (1 + 0.35 |x|) and P of degree 8, fitted for
/// the least relative error (3.2e-8) over |x| <= 14, where the exponential has reached 0.
struct Gelu : PlainOther {
  static simd::Vec value(simd::Vec x) { return x * parts(x).distribution; }
  static Slope slope(simd::Vec x) {
    const Parts p = parts(x);
    constexpr float kInverseSqrtTwoPi = 0.398942280401432678F;
    return {x * p.distribution, p.distribution + x * (p.exponential * kInverseSqrtTwoPi)};
  }

 private:
  struct Parts {
    simd::Vec distribution;  ///< Φ(x)
    simd::Vec exponential;   ///< e^(-x²/2)
  };

  static Parts parts(simd::Vec x) {
    const simd::Vec magnitude = x < 0.0F ? -x : x;
    const simd::Vec t = simd::reciprocal_from_one(1.0F + 0.35F * magnitude);
    simd::Vec p = t * -0.029146058F + 0.1439723F;
    p = p * t - 0.25571546F;
    p = p * t + 0.15917549F;
    p = p * t - 0.023110699F;
    p = p * t + 0.10550835F;
    p = p * t + 0.119832784F;
    p = p * t + 0.13986188F;
    p = p * t + 0.1396214F;
    const simd::Vec exponential = simd::exp(-0.5F * x * x);
    const simd::Vec tail = exponential * (t * p);
    return {x < 0.0F ? tail : 1.0F - tail, exponential};
  }
};

/// x/2 · (1 + tanh(u)) = x · sigmoid(2u), u = sqrt(2/π) (x + 0.044715 x³).
struct GeluTanh : PlainOther {
  static simd::Vec value(simd::Vec x) { return x * simd::sigmoid(twice_u(x)); }
  static Slope slope(simd::Vec x) {
    const simd::Vec s = simd::sigmoid(twice_u(x));
    const simd::Vec du = kTwiceSqrtTwoOverPi * (1.0F + 3.0F * kCubic * x * x);
    return {x * s, s + x * s * (1.0F - s) * du};
  }

 private:
  static constexpr float kTwiceSqrtTwoOverPi = 1.59576912160573081F;
  static constexpr float kCubic = 0.044715F;
  static simd::Vec twice_u(simd::Vec x) {
    return kTwiceSqrtTwoOverPi * x * (1.0F + kCubic * x * x);
  }
};

/// x · sigmoid(gain · x) of a clamped gate, and the other factor, of Activation::kSwiGLUOai or
/// kSwiGLUClamped. Gradients of what is clamped are 0, as PyTorch's.
struct ClampedSilu {
  ClampConstants c;

  simd::Vec value(simd::Vec gate) const {
    const simd::Vec x = gate > c.limit ? simd::broadcast(c.limit) : gate;
    return x * simd::sigmoid(c.gain * x);
  }
  Slope slope(simd::Vec gate) const {
    const simd::Vec x = gate > c.limit ? simd::broadcast(c.limit) : gate;
    const simd::Vec s = simd::sigmoid(c.gain * x);
    const simd::Vec derivative = s * (1.0F + c.gain * x * (1.0F - s));
    return {x * s, gate > c.limit ? simd::Vec{} : derivative};
  }
  simd::Vec other(simd::Vec up) const {
    const simd::Vec below = up > c.limit ? simd::broadcast(c.limit) : up;
    return (below < -c.limit ? simd::broadcast(-c.limit) : below) + c.offset;
  }
  simd::Vec other_grad(simd::Vec up, simd::Vec grad) const {
    const simd::Vec below = up > c.limit ? simd::Vec{} : grad;
    return up < -c.limit ? simd::Vec{} : below;
  }
};

/// max(x, 0)².
struct SquaredRelu : PlainOther {
  static simd::Vec value(simd::Vec x) { return positive(x) * positive(x); }
  static Slope slope(simd::Vec x) { return {value(x), 2.0F * positive(x)}; }

 private:
  /// NaN stays.
  static simd::Vec positive(simd::Vec x) { return x < 0.0F ? simd::Vec{} : x; }
};

/// Calls run(Silu{}), run(Gelu{}), run(GeluTanh{}), run(ClampedSilu{...}) or run(SquaredRelu{}),
/// whichever the activation applies to its (gate) input.
template <typename Run>
void with_activation(const ActivationFunction& function, Run run) {
  switch (function.kind) {
    case Activation::kSwiGLU:
      return run(Silu{});
    case Activation::kGeGLU:
    case Activation::kGelu:
      return run(Gelu{});
    case Activation::kGeGLUTanh:
    case Activation::kGeluTanh:
      return run(GeluTanh{});
    case Activation::kSwiGLUOai:
    case Activation::kSwiGLUClamped:
      return run(ClampedSilu{clamp_of(function)});
    case Activation::kRelu2:
      return run(SquaredRelu{});
  }
  ensure(false, "an unknown activation");
}

}  // namespace tessera
