#pragma once

#include "ops/operator.h"

namespace tessera {

/// Heads of a gated delta rule. Value head h reads with query and writes with key of head
/// h / (num_value_heads / num_key_heads).
struct GatedDeltaSpec {
  int64_t num_key_heads = 1;
  int64_t num_value_heads = 1;
  int64_t key_size = 1;    ///< Dk
  int64_t value_size = 1;  ///< Dv
};

/// Tokens that are computed together: the largest products are those of chunks.
inline constexpr int64_t kDeltaChunk = 64;
/// Beside the squares of a query or key that is made a unit vector.
inline constexpr float kUnitEps = 1e-6F;

/// What forward and backward operators share.
class GatedDeltaOperator : public Operator {
 public:
  /// Throws UserError unless all sizes are above 0 and value heads a multiple of key heads.
  explicit GatedDeltaOperator(const GatedDeltaSpec& spec);
  std::string attributes() const override;
  const GatedDeltaSpec& spec() const { return spec_; }

 protected:
  void check_operands(std::span<const ValueType> inputs, size_t count) const;
  /// Of the recurrence: decayed state times key, what is written, state times query.
  double recurrence_flops(std::span<const ValueType> inputs) const;

 private:
  GatedDeltaSpec spec_;
};

/// The gated delta rule (Gated Delta Networks: Yang et al., 2024, equation 10): for every value
/// head a state S [Dv, Dk], 0 before a sequence's first token, and
///   S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_tᵀ) + beta_t v_t k_tᵀ,   o_t = S_t q_t,
/// where q and k are made unit vectors, x / sqrt(x² + 1e-6), and q is divided by sqrt(Dk). (q A [T,
/// Nk·Dk], k A [T, Nk·Dk], v A [T, N·Dv], g F32 [T,N], beta F32 [T,N], cu_seqlens I32 [S+1]) -> o A
/// [T, N·Dv]. Sequence s is the rows cu_seqlens[s] to cu_seqlens[s + 1]; kernels for the CPU throw
/// UserError unless these rise from 0 to T. Kernels work in F32 by chunks of kDeltaChunk tokens
/// (section 3.3).
class GatedDelta final : public GatedDeltaOperator {
 public:
  static constexpr std::string_view kName = "gated_delta";
  enum Input : int { kQ, kK, kV, kDecay, kBeta, kCuSeqlens };
  enum Output : int { kO };
  using GatedDeltaOperator::GatedDeltaOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (q, k, v, g, beta, cu_seqlens, grad of o A [T, N·Dv]) -> gradients of q, k, v, g and beta, of
/// their types. The states between chunks are computed again, into scratch memory.
class GatedDeltaBackward final : public GatedDeltaOperator {
 public:
  static constexpr std::string_view kName = "gated_delta_backward";
  enum Input : int { kQ, kK, kV, kDecay, kBeta, kCuSeqlens, kGrad };
  enum Output : int { kGradQ, kGradK, kGradV, kGradDecay, kGradBeta };
  using GatedDeltaOperator::GatedDeltaOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

/// The same of T tokens of one sequence that follow earlier ones, for generation, behind which the
/// heads' states were F32 [N·Dk, Dv]; these are bound from outside as accumulators are, and move
/// on. (q, k, v, g, beta, start I32 [1]) -> (o A [T, N·Dv], the states). Where start, the number of
/// earlier tokens, is 0, what the states held is not read. No gradient.
class GatedDeltaCached final : public GatedDeltaOperator {
 public:
  static constexpr std::string_view kName = "gated_delta_cached";
  enum Input : int { kQ, kK, kV, kDecay, kBeta, kStart };
  enum Output : int { kO, kStates };
  using GatedDeltaOperator::GatedDeltaOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kStates; }
  bool recomputable() const override { return false; }
};

/// The same of several sequences' tokens: those of sequence s, rows cu_seqlens[s] to
/// cu_seqlens[s + 1], are the last of its lengths[s] tokens, and follow those behind which the
/// states in slot slots[s] were. (q, k, v, g, beta, cu_seqlens I32 [S+1], lengths I32 [S], slots
/// I32 [S]) -> (o A [T, N·Dv], the states of all slots F32 [slots·N·Dk, Dv]). What a slot held is
/// not read of a sequence that begins; one without rows, whose slot may be another's, has no
/// effect; o of rows behind the last sequence's is 0. Token by token, so that on the CPU the bits
/// do not depend on how a sequence is cut. No gradient.
class GatedDeltaBatch final : public GatedDeltaOperator {
 public:
  static constexpr std::string_view kName = "gated_delta_batch";
  enum Input : int { kQ, kK, kV, kDecay, kBeta, kCuSeqlens, kLengths, kSlots };
  enum Output : int { kO, kStates };
  GatedDeltaBatch(const GatedDeltaSpec& spec, int64_t num_slots)
      : GatedDeltaOperator(spec), num_slots_(num_slots) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kStates; }
  bool recomputable() const override { return false; }
  int64_t num_slots() const { return num_slots_; }

 private:
  int64_t num_slots_;
};

OperatorPtr make_gated_delta_batch(const GatedDeltaSpec& spec, int64_t num_slots);
OperatorPtr make_gated_delta_cached(const GatedDeltaSpec& spec);
OperatorPtr make_gated_delta(const GatedDeltaSpec& spec);
void add_gated_delta_cpu(KernelTable& table);
void add_gated_delta_cuda(KernelTable& table);

}  // namespace tessera
