#pragma once

#include "ops/operator.h"

namespace tessera {

// RMSNorm of rows whose elements are spread over ranks. Each rank has n of a row's elements; the
// ranks' sums of squares are added by collectives between the two operators, whose gradient rules
// together with those of the collectives give the gradient of the whole row's norm (ops/rmsnorm is
// the same on one rank).

/// x A [T, n] -> F32 [T]: each row's sum of squares.
class SquareSums final : public Operator {
 public:
  static constexpr std::string_view kName = "square_sums";
  enum Input : int { kX };
  enum Output : int { kSums };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x A [T, n], grad F32 [T]) -> grad of x A [T, n].
class SquareSumsBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "square_sums_backward";
  enum Input : int { kX, kGrad };
  enum Output : int { kGradX };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
};

struct SpreadNormSpec {
  /// Elements that the sums of squares are of, over all ranks.
  int64_t num_elements = 1;
  double eps = 0;
};

/// y = x · rstd · weight with rstd = 1 / sqrt(square sum / num_elements + eps): (x A [T, n], weight
/// F32 [n], square sums F32 [T]) -> A [T, n].
class SpreadNorm final : public Operator {
 public:
  static constexpr std::string_view kName = "spread_norm";
  enum Input : int { kX, kWeight, kSquareSums };
  enum Output : int { kY };

  /// Throws UserError unless there is an element and eps >= 0.
  explicit SpreadNorm(const SpreadNormSpec& spec);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  const SpreadNormSpec& spec() const { return spec_; }

 private:
  SpreadNormSpec spec_;
};

/// (x A [T, n], weight F32 [n], square sums F32 [T], grad of y A [T, n]) -> (grad of x A [T, n],
/// grad of the square sums F32 [T], grad of weight F32 [n], accumulated in a fixed order).
class SpreadNormBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "spread_norm_backward";
  enum Input : int { kX, kWeight, kSquareSums, kGrad };
  enum Output : int { kGradX, kGradSquareSums, kGradWeight };

  explicit SpreadNormBackward(const SpreadNormSpec& spec) : spec_(spec) {}

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight; }
  const SpreadNormSpec& spec() const { return spec_; }

 private:
  SpreadNormSpec spec_;
};

OperatorPtr make_square_sums();
OperatorPtr make_spread_norm(const SpreadNormSpec& spec);
void add_spread_norm_cpu(KernelTable& table);
void add_spread_norm_cuda(KernelTable& table);

}  // namespace tessera
