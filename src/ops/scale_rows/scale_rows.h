#pragma once

#include "ops/adamw/state_formats.h"
#include "ops/operator.h"

namespace tessera {

/// Multiplies each row of a weight by a factor of its own, as the optimizer keeps it: p = p · f,
/// rounded as state_rounding.h says where that is in fewer bits, stochastically where the bits of
/// an update are. Rows with the factor 1 keep their bits.
///
/// Input: factors F32 [rows]. Outputs, changed in place: what AdamW's kMaster is [rows, columns],
/// and where something is beside the weight, the weight BF16 [rows, columns].
class ScaleRows final : public Operator {
 public:
  static constexpr std::string_view kName = "scale_rows";
  enum Input : int { kFactors };
  enum Output : int { kMaster, kWeight };

  /// `beside`: what is kept beside a BF16 weight; of an F32 one kNone.
  ScaleRows(DType weight, MasterKind beside, int64_t columns);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool recomputable() const override { return false; }
  size_t num_outputs() const { return beside_ == MasterKind::kNone ? 1 : 2; }

 private:
  DType weight_;
  MasterKind beside_;
  int64_t columns_;
};

OperatorPtr make_scale_rows(DType weight, MasterKind beside, int64_t columns);
void add_scale_rows_cpu(KernelTable& table);
void add_scale_rows_cuda(KernelTable& table);

}  // namespace tessera
