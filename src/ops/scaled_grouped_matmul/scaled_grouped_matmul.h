#pragma once

#include "ops/expert_sizes.h"
#include "ops/operator.h"

namespace tessera {

struct ScaledGroupedMatmulSpec {
  /// Rows of the weight that belong to each expert.
  std::vector<int64_t> group_sizes;
  DType output = DType::kBF16;  ///< or F32
};

/// The product of each expert's rows with its own matrix, of FP8 values with scales:
///   (a e4m3 [R, K], weight e4m3 [Σ g_e, K], offsets I64 [E + 1]) -> y A [R, max g_e],
/// y = a · W_eᵀ, as GroupedMatmul's product on side out. Of one expert all rows can be: then there
/// are no offsets, and rows are not ragged. Both matrices lie along the reduction, as
/// tensor cores want FP8. Scales are of rows, of both; or of blocks of 1 × 128 of `a` and 128 × 128
/// of the weight, whose experts are then multiples of 128. With scales of rows, sums of a whole row
/// are scaled; with blocks, sums of 128 are, and added up in F32.
/// Source: DeepSeek-V3, section 3.3.2.
class ScaledGroupedMatmul final : public Operator {
 public:
  enum Input : int { kA, kWeight, kOffsets };
  enum Output : int { kY };
  static constexpr std::string_view kName = "scaled_grouped_matmul";
  /// Elements of a block's side.
  static constexpr int32_t kBlock = 128;

  explicit ScaledGroupedMatmul(const ScaledGroupedMatmulSpec& spec);
  const ExpertSizes& sizes() const { return sizes_; }
  DType output() const { return output_; }
  std::string_view name() const override { return kName; }
  /// "experts=8x1024".
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  ExpertSizes sizes_;
  DType output_;
};

/// Whether its kernel on a GPU takes experts of these sizes and reductions of this length.
bool runs_on_tensor_cores(const ExpertSizes& sizes, int64_t reduction);

/// What its kernels take and give (KernelOptions::takes).
bool takes_e4m3(const Format& format);

OperatorPtr make_scaled_grouped_matmul(const ScaledGroupedMatmulSpec& spec);
void add_scaled_grouped_matmul_cpu(KernelTable& table);
void add_scaled_grouped_matmul_cuda(KernelTable& table);

}  // namespace tessera
