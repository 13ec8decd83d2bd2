#pragma once

#include "ops/expert_sizes.h"
#include "ops/operator.h"

namespace tessera {

/// The gradient of a grouped weight of either side, of FP8 values that lie along tokens:
///   (narrow e4m3 [max g_e, N], wide e4m3 [H, N], scales of both F32 [S, max g_e] and [S, H],
///    offsets I64 [E + 1]) -> F32 [Σ g_e, H], accumulated:
/// block e gains narrow_e · wide_eᵀ over the expert's tokens, as GroupedMatmulWgrad has it of the
/// rows that a QuantizeTokens made these of (ops/quantize_tokens/quantize_tokens.h). One expert can
/// have all tokens: then there are no offsets, and it is the gradient of a dense weight. Scales are
/// of all tokens of an expert or of blocks of 128, of both operands; the sums of such tokens are
/// scaled, and those of blocks added up in F32. Source: DeepSeek-V3, section 3.3.2.
class ScaledGroupedWgrad final : public Operator {
 public:
  enum Input : int { kNarrow, kWide, kNarrowScales, kWideScales, kOffsets };
  enum Output : int { kGradWeight };
  static constexpr std::string_view kName = "scaled_grouped_wgrad";

  /// `by_block`: scales are of 128 tokens. `num_tokens`: that there are at most.
  ScaledGroupedWgrad(const ExpertSizes& sizes, bool by_block, int64_t num_tokens)
      : sizes_(sizes), by_block_(by_block), num_tokens_(num_tokens) {}
  const ExpertSizes& sizes() const { return sizes_; }
  bool by_block() const { return by_block_; }
  int64_t num_tokens() const { return num_tokens_; }
  std::string_view name() const override { return kName; }
  /// "experts=8x1024", "experts=8x1024 by block".
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight; }

 private:
  ExpertSizes sizes_;
  bool by_block_;
  int64_t num_tokens_;
};

/// Whether its kernel on a GPU takes experts of these sizes and rows of so many values.
bool has_scaled_wgrad(const ExpertSizes& sizes, int64_t wide);

void add_scaled_grouped_wgrad_cpu(KernelTable& table);
void add_scaled_grouped_wgrad_cuda(KernelTable& table);

}  // namespace tessera
