#pragma once

#include "ops/operator.h"

namespace tessera {

struct QuantizeSpec {
  DType element = DType::kE4M3;  ///< or kE5M2, or kF16
  /// Row, or blocks; of F16 none.
  ScaleLayout scale = ScaleLayout::row();
  /// Where not 0: x is matrices of so many rows, one after the other, each of which is transposed.
  int64_t turned_rows = 0;
};

/// Rounds values to FP8 whose neighbours share scales, by which what is stored is multiplied when
/// it is read: (x A [R, C]) -> y [R, C] of the specification's format (core/format.h). Rows may be
/// ragged where scales are of single rows. Matrices are turned, as tensor cores want an operand
/// that is added up along its columns: (x A [N · g, C]) -> y [N · C, g], y_n = x_nᵀ.
///
/// F16 has no scales: what is beyond its largest number becomes infinite, so that a step whose
/// gradients do is known by them (optim/loss_scaler.h).
///
/// What FP8 stands for is what RoundValues (ops/round_values/round_values.h) makes of x, or of what
/// is turned: the scale of a row or block is the least power of two with which no value of it is
/// beyond the largest number of the type. A NaN stays one; of a block with an infinity the scale
/// and all elements are NaN. Source: DeepSeek-V3, section 3.3.2 (blocks of 1 × 128 and 128 × 128).
class Quantize final : public Operator {
 public:
  enum Input : int { kX };
  enum Output : int { kY };
  static constexpr std::string_view kName = "quantize";
  /// Of which a GPU wants the sizes of what is turned to be multiples.
  static constexpr int64_t kTurnedUnit = 16;

  /// Throws UserError for another element type or layout.
  explicit Quantize(const QuantizeSpec& spec);
  const QuantizeSpec& spec() const { return spec_; }
  /// Elements that share a scale: of how many rows, and columns (of a row of `num_columns`).
  int64_t block_rows() const { return is_by_row() ? 1 : spec_.scale.rows; }
  int64_t block_columns(int64_t num_columns) const {
    return is_by_row() ? num_columns : spec_.scale.columns;
  }
  bool is_turned() const { return spec_.turned_rows > 0; }
  std::string_view name() const override { return kName; }
  /// "e4m3 block 1x128", "e4m3 row turned 768".
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  /// The shape of y.
  Shape turned(const ValueType& x) const;
  bool is_by_row() const { return spec_.scale.kind == ScaleLayout::Kind::kRow; }

  QuantizeSpec spec_;
};

/// The specification of F16.
QuantizeSpec half_spec();

/// What its kernels take and give (KernelOptions::takes).
bool takes_fp8(const Format& format);

/// By the CPU's kernel, for those that quantize what they give.
void quantize_on_host(const Quantize& op, const Tensor& x, const Tensor& y);

OperatorPtr make_quantize(const QuantizeSpec& spec);
void add_quantize_cpu(KernelTable& table);
void add_quantize_cuda(KernelTable& table);

}  // namespace tessera
