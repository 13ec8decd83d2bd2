#pragma once

#include "ops/expert_sizes.h"
#include "ops/operator.h"

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
};

/// The product of each expert's rows with its own matrix:
///   (a A, weight A [Σ g_e, H], offsets I64 [E + 1]) -> y A
///   kOut: a [R, H] -> y [R, max g_e];   kIn: a [R, max g_e] -> y [R, H]
/// Rows offsets[e] to offsets[e + 1] belong to expert e, whose block of the weight follows those of
/// the experts before it. Columns of the narrow matrix beyond an expert's own g_e are neither read
/// nor written. A is F32 or BF16; products accumulate in F32.
///
/// The gradient of `a` is the same operator on the other side; that of the weight is
/// GroupedMatmulWgrad. An expert without rows costs nothing and its gradient stays as it was.
class GroupedMatmul final : public Operator {
 public:
  /// Throws UserError for experts without size.
  explicit GroupedMatmul(const GroupedMatmulSpec& spec);

  const ExpertSizes& sizes() const { return sizes_; }
  GroupedSide side() const { return side_; }

  std::string_view name() const override { return "grouped_matmul"; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  ExpertSizes sizes_;
  GroupedSide side_;
};

/// The gradient of a grouped weight of either side:
///   (narrow A [R, max g_e], wide A [R, H], offsets I64 [E + 1]) -> F32 [Σ g_e, H], accumulated:
/// block e gains narrow_eᵀ · wide_e over the expert's rows.
class GroupedMatmulWgrad final : public Operator {
 public:
  explicit GroupedMatmulWgrad(const ExpertSizes& sizes) : sizes_(sizes) {}
  const ExpertSizes& sizes() const { return sizes_; }

  std::string_view name() const override { return "grouped_matmul_wgrad"; }
  std::string attributes() const override { return "experts=" + sizes_.to_string(); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == 0; }

 private:
  ExpertSizes sizes_;
};

OperatorPtr make_grouped_matmul(const GroupedMatmulSpec& spec);

void add_grouped_matmul_cpu(KernelTable& table);

}  // namespace tessera
