#pragma once

#include "ops/operator.h"

namespace tessera {

/// Heads of a state-space scan. Head h has B and C of group h / (num_heads / num_groups).
struct SsdSpec {
  int64_t num_heads = 1;   ///< H
  int64_t num_groups = 1;  ///< G
  int64_t head_size = 1;   ///< P
  int64_t state_size = 1;  ///< N
  double min_step = 0;
  double max_step = 0;  ///< 0: without limit
  /// Heads of A_log, D and dt_bias, W; the scan may have some of them, from first_head on. 0: H.
  int64_t all_heads = 0;
  int64_t first_head = 0;

  int64_t num_weights() const { return all_heads > 0 ? all_heads : num_heads; }
};

/// Tokens between which states are kept for the backward pass.
inline constexpr int64_t kSsdChunk = 64;

/// What forward and backward operators share.
class SsdOperator : public Operator {
 public:
  /// Throws UserError unless all sizes are above 0, groups divide heads, limits are in order and
  /// the heads are among those of the weights.
  explicit SsdOperator(const SsdSpec& spec);
  std::string attributes() const override;
  const SsdSpec& spec() const { return spec_; }

 protected:
  void check_operands(std::span<const ValueType> inputs, size_t count) const;
  /// Of the recurrence: decay, what is written, state times C.
  double recurrence_flops(std::span<const ValueType> inputs) const;

 private:
  SsdSpec spec_;
};

/// The scan of state-space duality, Mamba-2's (Transformers are SSMs: Dao and Gu, 2024, section 6):
/// for every head a state S [N, P], 0 before a sequence's first token, and
///   S_t = exp(-exp(A_log) d_t) S_{t-1} + d_t B_t x_tᵀ,   y_t = S_tᵀ C_t + D x_t,
/// where d_t = softplus(dt_t + dt_bias), raised to min_step and lowered to max_step. (x A [T, H·P],
/// dt A [T,H], B A [T, G·N], C A [T, G·N], A_log F32 [W], D F32 [W], dt_bias F32 [W], cu_seqlens
/// I32 [S+1]) -> y A [T, H·P]. Sequence s is the rows cu_seqlens[s] to cu_seqlens[s + 1]; kernels
/// for the CPU throw UserError unless these rise from 0 to T. Kernels work in F32; those of GPUs
/// for BF16 multiply values rounded to it (ssd_dual.h).
class SsdScan final : public SsdOperator {
 public:
  static constexpr std::string_view kName = "ssd_scan";
  enum Input : int { kX, kDt, kB, kC, kALog, kD, kDtBias, kCuSeqlens };
  enum Output : int { kY };
  using SsdOperator::SsdOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x, dt, B, C, A_log, D, dt_bias, cu_seqlens, grad of y A [T, H·P]) -> gradients of x, dt, B and
/// C, of their types; those of A_log, D and dt_bias F32 [W], accumulated in a fixed order. The
/// states between chunks are computed again, into scratch memory.
class SsdScanBackward final : public SsdOperator {
 public:
  static constexpr std::string_view kName = "ssd_scan_backward";
  enum Input : int { kX, kDt, kB, kC, kALog, kD, kDtBias, kCuSeqlens, kGrad };
  enum Output : int { kGradX, kGradDt, kGradB, kGradC, kGradALog, kGradD, kGradDtBias };
  using SsdOperator::SsdOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output >= kGradALog; }
};

/// The same of T tokens of one sequence that follow earlier ones, for generation, behind which the
/// heads' states were F32 [H·N, P]; these are bound from outside as accumulators are, and move on.
/// (x, dt, B, C, A_log, D, dt_bias, start I32 [1]) -> (y A [T, H·P], the states). Where start, the
/// number of earlier tokens, is 0, what the states held is not read. No gradient.
class SsdScanCached final : public SsdOperator {
 public:
  static constexpr std::string_view kName = "ssd_scan_cached";
  enum Input : int { kX, kDt, kB, kC, kALog, kD, kDtBias, kStart };
  enum Output : int { kY, kStates };
  using SsdOperator::SsdOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kStates; }
  bool recomputable() const override { return false; }
};

/// The same of several sequences' tokens: those of sequence s, rows cu_seqlens[s] to
/// cu_seqlens[s + 1], are the last of its lengths[s] tokens, and follow those behind which the
/// states in slot slots[s] were. (x, dt, B, C, A_log, D, dt_bias, cu_seqlens I32 [S+1], lengths I32
/// [S], slots I32 [S]) -> (y A [T, H·P], the states of all slots F32 [slots·H·N, P]). What a slot
/// held is not read of a sequence that begins; one without rows, whose slot may be another's, has
/// no effect; y of rows behind the last sequence's is 0. Token by token, so that the bits do not
/// depend on how a sequence is cut. No gradient.
class SsdScanBatch final : public SsdOperator {
 public:
  static constexpr std::string_view kName = "ssd_scan_batch";
  enum Input : int { kX, kDt, kB, kC, kALog, kD, kDtBias, kCuSeqlens, kLengths, kSlots };
  enum Output : int { kY, kStates };
  SsdScanBatch(const SsdSpec& spec, int64_t num_slots) : SsdOperator(spec), num_slots_(num_slots) {}
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

OperatorPtr make_ssd_scan(const SsdSpec& spec);
OperatorPtr make_ssd_scan_cached(const SsdSpec& spec);
OperatorPtr make_ssd_scan_batch(const SsdSpec& spec, int64_t num_slots);
void add_ssd_scan_cpu(KernelTable& table);
void add_ssd_scan_cuda(KernelTable& table);

}  // namespace tessera
