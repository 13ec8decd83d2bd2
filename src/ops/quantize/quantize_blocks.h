#pragma once

#include "ops/operator.h"

namespace tessera {

/// Rounds values to E4M3 as Quantize (ops/quantize/quantize.h) does for blocks of 128 × 128, with
/// elements and scales in tensors of their own, which may be parts of larger ones: (x F32 [R, C])
/// -> y E4M3 [R, C], scales F32 [⌈R/128⌉, ⌈C/128⌉]. Parts of a matrix that are cut at multiples of
/// 128 rows become what the whole one does.
class QuantizeBlocks final : public Operator {
 public:
  enum Input : int { kX };
  enum Output : int { kY, kScales };
  static constexpr std::string_view kName = "quantize_blocks";
  static constexpr int64_t kBlock = 128;

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
};

/// The shape of the scales of a matrix.
Shape shape_of_block_scales(const Shape& matrix);

OperatorPtr make_quantize_blocks();
void add_quantize_blocks_cpu(KernelTable& table);
void add_quantize_blocks_cuda(KernelTable& table);

}  // namespace tessera
