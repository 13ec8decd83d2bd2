#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// The nonlinearity between the two matrices of an MLP or expert. Gated ones multiply the function
/// of the gate half by the other half (Shazeer, "GLU variants improve Transformer", 2020).
enum class Activation {
  kSwiGLU,     ///< silu(gate) · up
  kGeGLU,      ///< gelu(gate) · up
  kGeGLUTanh,  ///< the same with GELU's tanh approximation
  /// g · sigmoid(1.702 g) · (clamp(up, -L, L) + 1), g = min(gate, L): gpt-oss's clamped SwiGLU,
  /// whose limit L is 7 (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.2)
  kSwiGLUOai,
  /// silu(g) · clamp(up, -L, L), g = min(gate, L): DeepSeek-V4's, whose limit L is 10 (its
  /// `swiglu_limit`)
  kSwiGLUClamped,
  kGelu,      ///< x · Φ(x), Φ the normal distribution function (exact, by erfc)
  kGeluTanh,  ///< GELU's tanh approximation (GPT-2's "gelu_new")
  kRelu2,     ///< max(x, 0)² (Primer: So et al., 2021, section 4.1)
};

/// Whether a SwiGLU clamps its inputs.
constexpr bool is_clamped(Activation kind) {
  return kind == Activation::kSwiGLUOai || kind == Activation::kSwiGLUClamped;
}

/// The limit that a clamped kind has in the models that brought it; 0 of the other kinds.
constexpr double published_limit(Activation kind) {
  if (!is_clamped(kind)) return 0;
  return kind == Activation::kSwiGLUOai ? 7 : 10;
}

/// An activation with its constants.
struct ActivationFunction {
  /// A limit of 0 is the published one. Kinds without a clamp have none, whatever is given.
  // NOLINTNEXTLINE(google-explicit-constructor): a kind stands for what was published
  constexpr ActivationFunction(Activation its_kind, double its_limit = 0)
      : kind(its_kind),
        limit(static_cast<float>(
            is_clamped(its_kind) && its_limit > 0 ? its_limit : published_limit(its_kind))) {}

  Activation kind;
  float limit;
};

/// Of SwiGLUs with clamped inputs: g · sigmoid(gain · g) · (up + offset), neither g nor |up| above
/// the limit.
struct ClampConstants {
  float gain;
  float limit;
  float offset;
};
constexpr ClampConstants clamp_of(const ActivationFunction& function) {
  return function.kind == Activation::kSwiGLUOai ? ClampConstants{1.702F, function.limit, 1.0F}
                                                 : ClampConstants{1.0F, function.limit, 0.0F};
}

constexpr bool is_gated(Activation kind) {
  return kind == Activation::kSwiGLU || kind == Activation::kGeGLU ||
         kind == Activation::kGeGLUTanh || is_clamped(kind);
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

/// The name, with the limit of what has one: "swiglu_clamped limit=10".
std::string to_string(const ActivationFunction& function);

}  // namespace tessera
