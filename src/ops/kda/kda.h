#pragma once

#include "ops/operator.h"

namespace tessera {

/// Heads of Kimi Delta Attention, each with queries, keys and values of its own.
struct KdaSpec {
  int64_t num_heads = 1;
  int64_t key_size = 1;    ///< Dk
  int64_t value_size = 1;  ///< Dv
};

/// Tokens that kernels for the CPU compute together. Decays between two tokens of a chunk differ
/// by element of a key, so that pairs of tokens cost more than with one decay a head.
inline constexpr int64_t kKdaChunk = 32;

/// What forward and backward operators share.
class KdaOperator : public Operator {
 public:
  /// Throws UserError unless all sizes are above 0.
  explicit KdaOperator(const KdaSpec& spec);
  std::string attributes() const override;
  const KdaSpec& spec() const { return spec_; }

 protected:
  void check_operands(std::span<const ValueType> inputs, size_t count) const;
  /// Of the recurrence: decayed state times key, what is written, state times query.
  double recurrence_flops(std::span<const ValueType> inputs) const;

 private:
  KdaSpec spec_;
};

/// Kimi Delta Attention (Kimi Linear: Kimi Team, 2025, equation 1): the gated delta rule
/// (ops/gated_delta) with a decay for each element of a key. For every head a state S [Dk, Dv], 0
/// before a sequence's first token, and
///   S_t = (I - beta_t k_t k_tᵀ) diag(exp(g_t)) S_{t-1} + beta_t k_t v_tᵀ,   o_t = S_tᵀ q_t,
/// where q and k are made unit vectors, x / sqrt(x² + 1e-6), and q is divided by sqrt(Dk). (q A [T,
/// N·Dk], k A [T, N·Dk], v A [T, N·Dv], g F32 [T, N·Dk], beta F32 [T,N], cu_seqlens I32 [S+1]) -> o
/// A [T, N·Dv]. g is at most 0. Sequence s is the rows cu_seqlens[s] to cu_seqlens[s + 1]; kernels
/// for the CPU throw UserError unless these rise from 0 to T. Kernels work in F32.
class Kda final : public KdaOperator {
 public:
  static constexpr std::string_view kName = "kda";
  enum Input : int { kQ, kK, kV, kDecay, kBeta, kCuSeqlens };
  enum Output : int { kO };
  using KdaOperator::KdaOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (q, k, v, g, beta, cu_seqlens, grad of o A [T, N·Dv]) -> gradients of q, k, v, g and beta, of
/// their types. The states between chunks are computed again, into scratch memory.
class KdaBackward final : public KdaOperator {
 public:
  static constexpr std::string_view kName = "kda_backward";
  enum Input : int { kQ, kK, kV, kDecay, kBeta, kCuSeqlens, kGrad };
  enum Output : int { kGradQ, kGradK, kGradV, kGradDecay, kGradBeta };
  using KdaOperator::KdaOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

/// The same of T tokens of one sequence that follow earlier ones, for generation, behind which the
/// heads' states were F32 [N·Dk, Dv]; these are bound from outside as accumulators are, and move
/// on. (q, k, v, g, beta, start I32 [1]) -> (o A [T, N·Dv], the states). Where start, the number of
/// earlier tokens, is 0, what the states held is not read. No gradient.
class KdaCached final : public KdaOperator {
 public:
  static constexpr std::string_view kName = "kda_cached";
  enum Input : int { kQ, kK, kV, kDecay, kBeta, kStart };
  enum Output : int { kO, kStates };
  using KdaOperator::KdaOperator;
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
class KdaBatch final : public KdaOperator {
 public:
  static constexpr std::string_view kName = "kda_batch";
  enum Input : int { kQ, kK, kV, kDecay, kBeta, kCuSeqlens, kLengths, kSlots };
  enum Output : int { kO, kStates };
  KdaBatch(const KdaSpec& spec, int64_t num_slots) : KdaOperator(spec), num_slots_(num_slots) {}
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

OperatorPtr make_kda(const KdaSpec& spec);
OperatorPtr make_kda_cached(const KdaSpec& spec);
OperatorPtr make_kda_batch(const KdaSpec& spec, int64_t num_slots);
void add_kda_cpu(KernelTable& table);
void add_kda_cuda(KernelTable& table);

}  // namespace tessera
