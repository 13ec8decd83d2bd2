#pragma once

#include <string_view>

namespace tessera {

/// The nonlinearity between the two matrices of an MLP or expert. Gated ones multiply the function
/// of the gate half by the other half (Shazeer, "GLU variants improve Transformer", 2020).
enum class Activation {
  kSwiGLU,     ///< silu(gate) · up
  kGeGLU,      ///< gelu(gate) · up
  kGeGLUTanh,  ///< the same with GELU's tanh approximation
  kGelu,       ///< x · Φ(x), Φ the normal distribution function (exact, by erfc)
  kGeluTanh,   ///< GELU's tanh approximation (GPT-2's "gelu_new")
};

constexpr bool is_gated(Activation kind) {
  return kind == Activation::kSwiGLU || kind == Activation::kGeGLU ||
         kind == Activation::kGeGLUTanh;
}

constexpr std::string_view activation_name(Activation kind) {
  switch (kind) {
    case Activation::kSwiGLU:
      return "swiglu";
    case Activation::kGeGLU:
      return "geglu";
    case Activation::kGeGLUTanh:
      return "geglu_tanh";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
  }
  return "unknown";
}

}  // namespace tessera
