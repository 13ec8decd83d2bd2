#pragma once

#include "ops/gather.h"
#include "ops/operator.h"

namespace tessera {

/// Which tokens of a feature share a scale.
enum class TokenScales : uint8_t {
  kGroup,  ///< all of a group
  kBlock,  ///< 128, from the group's first one on
};

/// Rounds rows of tokens to E4M3 and transposes them, so that tensor cores can add up tokens, as
/// the gradient of a weight does:
///   (x A [R, C], and with groups: offsets I64 [E + 1]) -> y E4M3 [C, N], scales F32 [S, C]
/// A is F32, BF16, or FP8 whose scales are of single rows or parts of them, which x then stands
/// for. Rows offsets[e] to offsets[e + 1] are group e, such as an expert's tokens; without offsets
/// all rows are one group. Each group begins at a multiple of 128 of y's columns and is filled up
/// with zeros to the next (token_blocks.h); N is 128 times the number of blocks that there is room
/// for. Columns of blocks that are nobody's are not written. By group S is E, by block N / 128.
///
/// What y times its scales stands for is what RoundValues (ops/round_values/round_values.h) makes
/// of x down columns: the scale is the least power of two with which no value is beyond E4M3's
/// largest. That of a group without tokens is that of zeros. Source: DeepSeek-V3, section 3.3.2.
///
/// With `gather` it takes two inputs more, source_R I32 [R] and row_of_TK I32 [T, K]
/// (ops/permute/permute.h), x is [T, C], and the rows are those that Permute makes of it.
class QuantizeTokens final : public Operator, public TakesGather {
 public:
  enum Input : int { kX, kOffsets, kSource, kRowOf };
  enum Output : int { kY, kScales };
  static constexpr std::string_view kName = "quantize_tokens";
  /// Of which a GPU wants the columns of x to be a multiple.
  static constexpr int64_t kUnit = 16;

  explicit QuantizeTokens(TokenScales scales, bool gather = false)
      : scales_(scales), gather_(gather) {}
  TokenScales scales() const { return scales_; }
  bool is_by_block() const { return scales_ == TokenScales::kBlock; }
  bool gather() const { return gather_; }
  std::string_view name() const override { return kName; }
  /// "e4m3 group", "e4m3 128 gather".
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  OperatorPtr with_gather(int input) const override;
  /// Tokens lie in the L2 cache longer than their copies.
  double gather_cost(std::span<const ValueType> /*inputs*/) const override { return 0; }
  double gradient_gather_cost(std::span<const ValueType> /*inputs*/) const override { return 0; }

 private:
  TokenScales scales_;
  bool gather_;
};

/// An operator that reads what a QuantizeTokens makes takes E4M3 without scales of its own
/// (KernelOptions::takes); the operands of a QuantizeTokens hold that and rows with scales.
bool takes_e4m3_codes(const Format& format);
bool takes_tokens(const Format& format);

OperatorPtr make_quantize_tokens(TokenScales scales);
void add_quantize_tokens_cpu(KernelTable& table);
void add_quantize_tokens_cuda(KernelTable& table);

}  // namespace tessera
