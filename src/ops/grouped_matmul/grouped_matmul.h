#pragma once

#include "ops/expert_sizes.h"
#include "ops/gather.h"
#include "ops/gradient_value.h"

namespace tessera {

/// Which side of an expert's matrix has the size that may differ between experts.
enum class GroupedSide {
  kOut,  ///< FC1: blocks are [out g_e, in H], y = a · W_eᵀ
  kIn,   ///< FC2: blocks are [in g_e, out H], y = a · W_e
};

struct GroupedMatmulSpec {
  /// g_e: rows of the weight that belong to each expert.
  std::vector<int64_t> group_sizes;
  GroupedSide side = GroupedSide::kOut;
  /// kOut: rows of `a` are gathered as they are read.
  bool gather = false;
};

/// The product of each expert's rows with its own matrix:
///   (a A, weight A [Σ g_e, H], offsets I64 [E + 1]) -> y A
///   kOut: a [R, H] -> y [R, max g_e];   kIn: a [R, max g_e] -> y [R, H]
/// Rows offsets[e] to offsets[e + 1] belong to expert e, whose block of the weight follows those of
/// the experts before it. Columns of the narrow matrix beyond an expert's own g_e are neither read
/// nor written. A is F32 or BF16; or a and weight are F16, and y is F32. Products accumulate in
/// F32.
///
/// With `gather` the rows of `a` are not made: it is
///   (x A [T, H], weight, offsets, source_R I32 [R], row_of_TK I32 [T, K]) -> y A [R, max g_e]
/// with the maps and the bits of Permute (ops/permute/permute.h) and the product of what it gives.
///
/// The gradient of `a` is the same operator on the other side, that of x an Unpermute of it; that
/// of the weight is GroupedMatmulWgrad. An expert without rows costs nothing and its gradient stays
/// as it was.
class GroupedMatmul final : public Operator, public TakesGather {
 public:
  static constexpr std::string_view kName = "grouped_matmul";
  enum Input : int { kA, kWeight, kOffsets, kSource, kRowOf };
  enum Output : int { kY };

  /// Throws UserError for experts without size and for a gather on the narrow side.
  explicit GroupedMatmul(const GroupedMatmulSpec& spec);

  const ExpertSizes& sizes() const { return sizes_; }
  GroupedSide side() const { return side_; }
  bool gather() const { return gather_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  OperatorPtr with_gather(int input) const override;
  double gather_cost(std::span<const ValueType> inputs) const override;
  double gradient_gather_cost(std::span<const ValueType> inputs) const override;

 private:
  ExpertSizes sizes_;
  GroupedSide side_;
  bool gather_;
};

/// The gradient of a grouped weight of either side:
///   (narrow A [R, max g_e], wide A [R, H], offsets I64 [E + 1]) -> F32 [Σ g_e, H], accumulated:
/// block e gains narrow_eᵀ · wide_e over the expert's rows. With `gather` the rows of `wide` are
/// those that Permute would make: (narrow, x A [T, H], offsets, source_R I32 [R], row_of_TK I32 [T,
/// K]). As the gradient of a weight that is a value, it is one: written, zeros for an expert
/// without rows.
class GroupedMatmulWgrad final : public Operator, public TakesGather, public AccumulatesGradient {
 public:
  static constexpr std::string_view kName = "grouped_matmul_wgrad";
  static constexpr std::string_view kOfValue = "grouped_matmul_wgrad_of_value";
  enum Input : int { kNarrow, kWide, kOffsets, kSource, kRowOf };
  enum Output : int { kGradWeight };

  explicit GroupedMatmulWgrad(const ExpertSizes& sizes, bool gather = false, bool of_value = false)
      : sizes_(sizes), gather_(gather), of_value_(of_value) {}
  const ExpertSizes& sizes() const { return sizes_; }
  bool gather() const { return gather_; }
  bool of_value() const { return of_value_; }

  std::string_view name() const override { return of_value_ ? kOfValue : kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight && !of_value_; }
  OperatorPtr with_gather(int input) const override;
  double gather_cost(std::span<const ValueType> inputs) const override;
  double gradient_gather_cost(std::span<const ValueType> /*inputs*/) const override { return 0; }
  OperatorPtr with_value() const override;

 private:
  ExpertSizes sizes_;
  bool gather_;
  bool of_value_;
};

OperatorPtr make_grouped_matmul(const GroupedMatmulSpec& spec);

void add_grouped_matmul_cpu(KernelTable& table);
/// GroupedMatmul alone, by gemm_of_rows.
void add_grouped_matmul_of_rows_cpu(KernelTable& table);

}  // namespace tessera
