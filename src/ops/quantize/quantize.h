#pragma once

#include "ops/operator.h"

namespace tessera {

struct QuantizeSpec {
  DType element = DType::kE4M3;  ///< or kE5M2
  /// Row, or blocks.
  ScaleLayout scale = ScaleLayout::row();
};

/// Rounds values to FP8 whose neighbours share scales, by which what is stored is multiplied when
/// it is read: (x A [R, C]) -> y [R, C] of the specification's format (core/format.h). Rows may be
/// ragged where scales are of single rows.
///
/// The scale of a row or block is its largest magnitude, at least kSmallestAmax, over the largest
/// number of the type; elements are x · (largest number / largest magnitude), rounded to nearest
/// even and never beyond the largest. A NaN stays one; of a block with an infinity the scale is
/// infinite and all elements are 0 or NaN, so that what reads it finds NaN.
/// Source: DeepSeek-V3, section 3.3.2 (blocks of 1 × 128 and 128 × 128).
class Quantize final : public Operator {
 public:
  enum Input : int { kX };
  enum Output : int { kY };
  static constexpr std::string_view kName = "quantize";
  /// Scales of smaller values would not be normal numbers.
  static constexpr float kSmallestAmax = 0x1p-100F;

  /// Throws UserError for another element type or layout.
  explicit Quantize(const QuantizeSpec& spec);
  const QuantizeSpec& spec() const { return spec_; }
  /// Elements that share a scale: of how many rows, and columns (of a row of `num_columns`).
  int64_t block_rows() const { return is_by_row() ? 1 : spec_.scale.rows; }
  int64_t block_columns(int64_t num_columns) const {
    return is_by_row() ? num_columns : spec_.scale.columns;
  }
  std::string_view name() const override { return kName; }
  /// "e4m3 block 1x128".
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  bool is_by_row() const { return spec_.scale.kind == ScaleLayout::Kind::kRow; }

  QuantizeSpec spec_;
};

/// The largest number of an FP8 type.
float largest_of(DType element);

/// What its kernels take and give (KernelOptions::takes).
bool takes_fp8(const Format& format);

OperatorPtr make_quantize(const QuantizeSpec& spec);
void add_quantize_cpu(KernelTable& table);
void add_quantize_cuda(KernelTable& table);

}  // namespace tessera
