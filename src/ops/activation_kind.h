#pragma once

#include <string_view>

namespace tessera {

/// The nonlinearity between the two matrices of an MLP or expert. Gated ones multiply the function
/// of the gate half by the other half (Shazeer, "GLU variants improve Transformer", 2020).
enum class Activation {
  kSwiGLU,     ///< silu(gate) · up
  kGeGLU,      ///< gelu(gate) · up
  kGeGLUTanh,  ///< the same with GELU's tanh approximation
  /// g · sigmoid(1.702 g) · (clamp(up, -7, 7) + 1), g = min(gate, 7): gpt-oss's clamped SwiGLU
  /// (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.2)
  kSwiGLUOai,
  /// silu(g) · clamp(up, -10, 10), g = min(gate, 10): DeepSeek-V4's (its `swiglu_limit`)
  kSwiGLUClamped,
  kGelu,      ///< x · Φ(x), Φ the normal distribution function (exact, by erfc)
  kGeluTanh,  ///< GELU's tanh approximation (GPT-2's "gelu_new")
  kRelu2,     ///< max(x, 0)² (Primer: So et al., 2021, section 4.1)
};

/// Of SwiGLUs with clamped inputs: g · sigmoid(kGain · g) · (up + kOffset), neither g nor |up|
/// above kLimit.
struct OaiClamp {
  static constexpr float kGain = 1.702F;
  static constexpr float kLimit = 7.0F;
  static constexpr float kOffset = 1.0F;
};
struct PlainClamp {
  static constexpr float kGain = 1.0F;
  static constexpr float kLimit = 10.0F;
  static constexpr float kOffset = 0.0F;
};

constexpr bool is_gated(Activation kind) {
  return kind == Activation::kSwiGLU || kind == Activation::kGeGLU ||
         kind == Activation::kGeGLUTanh || kind == Activation::kSwiGLUOai ||
         kind == Activation::kSwiGLUClamped;
}

constexpr std::string_view activation_name(Activation kind) {
  switch (kind) {
    case Activation::kSwiGLU:
      return "swiglu";
    case Activation::kGeGLU:
      return "geglu";
    case Activation::kGeGLUTanh:
      return "geglu_tanh";
    case Activation::kSwiGLUOai:
      return "swiglu_oai";
    case Activation::kSwiGLUClamped:
      return "swiglu_clamped";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
    case Activation::kRelu2:
      return "relu2";
  }
  return "unknown";
}

}  // namespace tessera
