#pragma once

#include <vector>

#include "ops/operator.h"

namespace tessera {

/// base^(-2i / rotary_dim) for i < rotary_dim / 2, in F32 as Hugging Face's models compute them.
/// Throws UserError unless rotary_dim is even and positive and base is positive.
std::vector<float> default_inverse_frequencies(int64_t rotary_dim, double base);

/// Which rotation rope applies. Of each head the 2 · |inverse_frequencies| elements from `offset`
/// on are rotated, the others pass through; scaled variants give other frequencies and an
/// amplitude.
struct RotarySpec {
  int64_t num_heads = 1;
  int64_t head_size = 0;
  int64_t offset = 0;
  /// Pairs are neighbours (2i, 2i + 1) of the rotated part, not the two halves (i, i + half).
  bool interleaved = false;
  std::vector<float> inverse_frequencies;
  float amplitude = 1.0F;  ///< multiplies the rotated part (YaRN's attention factor)

  int64_t rotary_dim() const { return 2 * static_cast<int64_t>(inverse_frequencies.size()); }
};

/// Rotary position embedding (Su et al., "RoFormer", 2021) in the rotate-half convention of Hugging
/// Face's Llama: element i of the rotated part pairs with element i + rotary_dim / 2, and both turn
/// by position · inverse_frequencies[i]; or neighbours pair, as in the original (DeepSeek). (x A
/// [T, N·D], positions I32 [T]) -> A [T, N·D]. Dim T may be ragged. With `inverse` it turns back:
/// that is its own gradient.
class Rope final : public Operator {
 public:
  enum Input : int { kX, kPositions };
  enum Output : int { kY };

  /// Heads are at most this wide, so that a token's angles fit on the stack.
  static constexpr int64_t kMaxRotaryDim = 1024;

  /// Throws UserError where the rotated part is empty or larger than a head.
  Rope(RotarySpec spec, bool inverse);

  std::string_view name() const override { return inverse_ ? "rope_backward" : "rope"; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  const RotarySpec& spec() const { return spec_; }
  bool inverse() const { return inverse_; }

 private:
  RotarySpec spec_;
  bool inverse_;
};

OperatorPtr make_rope(RotarySpec spec);
void add_rope_cpu(KernelTable& table);
void add_rope_cuda(KernelTable& table);

}  // namespace tessera
