#pragma once

#include <vector>

#include "ops/operator.h"
#include "ops/round_values/cast_spec.h"
#include "ops/tallies.h"

namespace tessera {

struct RoundValuesSpec {
  CastSpec cast;
  /// The dim along which the product that reads the values adds up: 1 along rows, 0 down columns.
  int sum_dim = 1;
  /// Rows of each group of rows, in order, none of whose scales reaches into another: experts of a
  /// weight. Empty: one group, or with `offsets` those that come.
  std::vector<int64_t> group_rows = {};
  /// The groups are rows offsets[e] to offsets[e + 1]; other rows are not written.
  bool offsets = false;
  /// Of a delayed cast: the operands that the values are, whose scales are one; the places of
  /// these in the scales and in the tally.
  std::vector<int> places = {};
  /// Likewise: whether what it sees is counted.
  bool tallies = false;
  /// Likewise: what is beyond the largest number becomes NaN rather than that number.
  bool overflows = false;
};

/// Rounds values to numbers of few bits times scales, and gives what these stand for:
///   (x A [R, C], and with offsets: I64 [E + 1], delayed: scales F32 [N]) ->
///   y A [R, C], and where it tallies I64 [N, 4], added to (ops/round_values/tally.h)
/// A product of what is given is that of a processor whose tensor cores multiply such numbers, to
/// within the order of its sums: results have at most six digits and scales are powers of two, or
/// have four digits, so they are exact in BF16, but for the smallest.
///
/// A scale is the least power of two with which no value of its block is beyond the largest number.
/// Nested, it is (largest of the block) / (largest number) / g rounded to E4M3, times g, a power of
/// two for the group such that no scale is beyond 448; what is beyond the largest number then
/// becomes that. A NaN stays one; where a block has an infinity, all of it becomes NaN.
/// Rotated, the last values of a group that are fewer than 16 are rotated by smaller matrices.
/// Delayed, a scale of 0 is one that is not known: y is x. A value that is infinite becomes NaN.
/// Source: OCP Microscaling Formats 1.0; DeepSeek-V3, section 3.3.2; NVIDIA, "Pretraining Large
/// Language Models with NVFP4", section 4; delayed scales: NVIDIA's Transformer Engine.
class RoundValues final : public Operator, public Tallies {
 public:
  enum Input : int { kX, kOffsets, kScales };
  enum Output : int { kY, kTally };
  static constexpr std::string_view kName = "round_values";

  /// Throws UserError for a cast that cannot be.
  explicit RoundValues(const RoundValuesSpec& spec);
  const RoundValuesSpec& spec() const { return spec_; }
  std::string_view name() const override { return kName; }
  OperandSet<Input> input_set() const;
  OperandSet<Output> output_set() const;
  /// "e4m3 1x128 along rows", "e4m3 delayed 3 6, tallied".
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kTally; }
  OperatorPtr without_tally() const override;

 private:
  void check_delayed() const;

  RoundValuesSpec spec_;
};

OperatorPtr make_round_values(const RoundValuesSpec& spec);
void add_round_values_cpu(KernelTable& table);
void add_round_values_cuda(KernelTable& table);

}  // namespace tessera
