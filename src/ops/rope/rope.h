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
/// [T, N·D], with second_heads: A [T, N2·D], positions I32 [T]) -> (A [T, N·D], with second_heads:
/// A [T, N2·D]), both turned by the same angles: queries and keys. Dim T may be ragged. With
/// `inverse` it turns back: that is its own gradient.
class Rope final : public Operator {
 public:
  enum Input : int { kX, kSecondX, kPositions };
  enum Output : int { kY, kSecondY };

  /// Heads are at most this wide, so that a token's angles fit on the stack.
  static constexpr int64_t kMaxRotaryDim = 1024;

  /// `second_heads`: those of the second tensor; 0: there is none. Throws UserError where that is
  /// negative, and where the rotated part is empty or larger than a head.
  Rope(RotarySpec spec, bool inverse, int64_t second_heads = 0);

  std::string_view name() const override { return inverse_ ? "rope_backward" : "rope"; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  const RotarySpec& spec() const { return spec_; }
  bool inverse() const { return inverse_; }
  int64_t second_heads() const { return second_heads_; }
  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kX, kPositions}.add(kSecondX, second_heads_ > 0);
  }
  OperandSet<Output> output_set() const {
    return OperandSet<Output>{kY}.add(kSecondY, second_heads_ > 0);
  }

 private:
  void check_heads(const ValueType& x, int64_t num_heads) const;
  /// Turns the gradient of y, whose tensor has `num_heads` heads, back.
  void differentiate_one(GradientBuilder& builder, Input x, Output y, int64_t num_heads) const;

  RotarySpec spec_;
  bool inverse_;
  int64_t second_heads_;
};

/// Of one tensor, or of two by the same angles.
OperatorPtr make_rope(RotarySpec spec, int64_t second_heads = 0);
void add_rope_cpu(KernelTable& table);
void add_rope_cuda(KernelTable& table);

}  // namespace tessera
