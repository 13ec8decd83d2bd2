#pragma once

#include "ops/operator.h"

namespace tessera {

/// The values that rows of FP8 stand for, each element times its scale: (x FP8 [R, C] whose scales
/// are of single rows, of parts of them, or of blocks of several) -> y A [R, C]; A is F32 or BF16.
/// Rows with scales of their own may be ragged.
/// What a Quantize made of values, rounded by their rows, stands for is given exactly: products of
/// four digits and powers of two, which BF16 holds. The inverse of Quantize
/// (ops/quantize/quantize.h) on what that gives.
class Dequantize final : public Operator {
 public:
  enum Input : int { kX };
  enum Output : int { kY };
  static constexpr std::string_view kName = "dequantize";

  /// Throws InternalError for another type than F32 and BF16.
  explicit Dequantize(DType dtype);
  DType dtype() const { return dtype_; }
  std::string_view name() const override { return kName; }
  /// "bf16".
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  DType dtype_;
};

/// What its kernels take (KernelOptions::takes).
bool takes_dequantized(const Format& format);

OperatorPtr make_dequantize(DType dtype);
void add_dequantize_cpu(KernelTable& table);
void add_dequantize_cuda(KernelTable& table);

}  // namespace tessera
