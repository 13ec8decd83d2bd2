#pragma once

#include "ops/operator.h"

namespace tessera {

/// RMSNorm without a weight, of each head by itself: y = x / sqrt(mean(x²) + eps) over each run of
/// `head_size` elements of a row, as Gemma 4 norms values, Llama 4 queries and keys. (x A [T, N·D])
/// -> (y A [T, N·D]). Computed in F32 and rounded once.
class UnitNorm final : public Operator {
 public:
  static constexpr std::string_view kName = "unit_norm";
  enum Input : int { kX };
  enum Output : int { kY };

  /// Throws UserError unless head_size >= 1 and eps >= 0.
  UnitNorm(int64_t head_size, double eps);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  int64_t head_size() const { return head_size_; }
  float eps() const { return static_cast<float>(eps_); }

 private:
  int64_t head_size_;
  double eps_;
};

/// (x A [T, N·D], grad of y A [T, N·D]) -> (grad of x A [T, N·D]). The norms are found again.
class UnitNormBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "unit_norm_backward";
  enum Input : int { kX, kGrad };
  enum Output : int { kGradX };

  UnitNormBackward(int64_t head_size, double eps) : head_size_(head_size), eps_(eps) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  int64_t head_size() const { return head_size_; }
  float eps() const { return static_cast<float>(eps_); }

 private:
  int64_t head_size_;
  double eps_;
};

OperatorPtr make_unit_norm(int64_t head_size, double eps);
void add_unit_norm_cpu(KernelTable& table);
void add_unit_norm_cuda(KernelTable& table);

}  // namespace tessera
