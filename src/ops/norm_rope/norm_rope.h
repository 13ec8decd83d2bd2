#pragma once

#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"

namespace tessera {

/// The norm of every head and its rotation in one: Rope(RmsNorm(x)) with what is between them kept
/// in F32. (x A [T, N·D], weight F32 [D], positions I32 [T]) -> (y A [T, N·D], rstd as RmsNorm
/// gives it). Dim T may be ragged.
class NormRope final : public Operator {
 public:
  static constexpr std::string_view kName = "norm_rope";
  enum Input : int { kX, kWeight, kPositions };
  enum Output : int { kY, kRstd };

  static constexpr int64_t kMaxHeadSize = 1024;

  /// Throws UserError for heads of more than kMaxHeadSize, and for what RmsNorm and Rope refuse.
  NormRope(double eps, const RotarySpec& spec);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  float eps() const { return norm_.eps(); }
  const RotarySpec& spec() const { return rope_.spec(); }

 private:
  RmsNorm norm_;
  Rope rope_;
};

/// (x A [T, N·D], weight F32 [D], positions I32 [T], rstd, grad of y A [T, N·D]) -> (grad of x A
/// [T, N·D], grad of weight F32 [D], accumulated in a fixed order).
class NormRopeBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "norm_rope_backward";
  enum Input : int { kX, kWeight, kPositions, kRstd, kGrad };
  enum Output : int { kGradX, kGradWeight };

  explicit NormRopeBackward(const RotarySpec& spec) : back_(spec, true) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return back_.attributes(); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight; }
  const RotarySpec& spec() const { return back_.spec(); }

 private:
  Rope back_;
};

OperatorPtr make_norm_rope(double eps, const RotarySpec& spec);
void add_norm_rope_cpu(KernelTable& table);
void add_norm_rope_cuda(KernelTable& table);

}  // namespace tessera
