#pragma once

#include "ops/adamw/adamw_factors.h"
#include "ops/adamw/state_formats.h"
#include "ops/muon/muon_factors.h"
#include "ops/operator.h"

namespace tessera {

struct MuonSpec {
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.1;
  /// Whether the weight is BF16; an F32 one is its own master. Matrices are orthogonalized in the
  /// weight's type.
  bool bf16_weight = false;
  /// Of its second moment nothing is kept.
  StateFormats formats = {};

  DType weight_dtype() const { return bf16_weight ? DType::kBF16 : DType::kF32; }
  /// What is kept beside a BF16 weight.
  MasterKind master() const { return bf16_weight ? formats.master : MasterKind::kNone; }
};

// clang-format off
/// One step of Muon (Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024) on B matrices of one
/// shape, with the decay and the scale of Moonlight (Liu and others, "Muon is Scalable for LLM Training", 2025), is
/// MuonMomentum, NewtonSchulz and MuonUpdate:
///   g = grad · scale
///   m = m + (1 - momentum) · (g - m);   u = g + momentum · (m - g), or m without Nesterov's look ahead
///   o = newton_schulz(u)
///   p = p · (1 - lr · weight_decay) - lr · 0.2 · sqrt(max(rows, columns)) · o
/// so an update has a root mean square of about 0.2, as AdamW's has, and AdamW's learning rate fits.
///
/// This is the second line. Inputs: of each matrix grad F32 [n], n = rows · columns; then factors F32 [8], a MuonFactors, and
/// grad_scale F32 [2], an AdamWGradScale; where found_inf is not 0 nothing is written. Outputs: of each matrix m [n], of
/// moment_dtype, updated in place; then u [B, n] of the weight's type. Where m has scales, it and grad are [rows, columns], and
/// behind each m come its scales U8 [rows, count_moment_blocks(columns)].
/// What is kept in fewer bits is rounded as state_rounding.h and moment_code.h say.
// clang-format on
class MuonMomentum final : public Operator {
 public:
  static constexpr std::string_view kName = "muon_momentum";
  /// Inputs behind those of the matrices.
  enum Trailing : int { kFactors, kGradScale, kNumTrailing };

  /// Throws UserError where a rate is out of range.
  explicit MuonMomentum(const MuonSpec& spec);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool recomputable() const override { return false; }
  const MuonSpec& spec() const { return spec_; }
  bool scaled() const { return has_scales(spec_.formats.first_moment); }
  /// Outputs of one matrix: m, and its scales.
  int64_t num_kept() const { return scaled() ? 2 : 1; }

 private:
  MuonSpec spec_;
};

/// The last line. Inputs: o [B, n] of the weight's type; factors and grad_scale, as above. Outputs,
/// updated in place, of each matrix: what AdamW's kMaster is [n], and where something is beside the
/// weight, the weight BF16 [n]. What is kept in fewer bits is rounded as state_rounding.h says.
class MuonUpdate final : public Operator {
 public:
  static constexpr std::string_view kName = "muon_update";
  enum Input : int { kOrthogonal, kFactors, kGradScale, kNumInputs };
  /// Outputs of one matrix.
  enum Output : int { kMaster, kWeight };

  explicit MuonUpdate(const MuonSpec& spec);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool recomputable() const override { return false; }
  const MuonSpec& spec() const { return spec_; }
  size_t num_outputs() const { return spec_.master() == MasterKind::kNone ? 1 : 2; }

 private:
  DType master_type() const;

  MuonSpec spec_;
};

OperatorPtr make_muon_momentum(const MuonSpec& spec);
OperatorPtr make_muon_update(const MuonSpec& spec);

/// The operators' input `factors` for update number `update`, counted from 1, of matrices of this
/// shape. The rate is rounded to a float first.
MuonFactors make_muon_factors(const MuonSpec& spec, double lr, int64_t update, int64_t rows,
                              int64_t columns);

/// The operators' input as a tensor of this memory.
Tensor view_of(MuonFactors& factors);

void add_muon_cpu(KernelTable& table);
void add_muon_cuda(KernelTable& table);

}  // namespace tessera
