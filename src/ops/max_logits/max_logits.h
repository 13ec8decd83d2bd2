#pragma once

#include <limits>

#include "core/zigzag.h"
#include "ops/attention/attention.h"
#include "ops/max_logits/token_rows.h"

namespace tessera {

struct MaxLogitsSpec {
  AttentionSpec attention;
  /// What of larger logits is to be known exactly.
  double limit = 0;
  /// Where a ring shares the tokens: how, and which place this rank has. A ring of one: it does
  /// not.
  Zigzag tokens = {};
  int64_t rank = 0;
};

/// The largest logit of each head of causal attention, as QK clip needs it (Kimi K2 technical
/// report, 2025, section 2.1). A row's log-sum-exp is at least its largest logit, so no row is
/// looked at of which that is at most the limit:
///   m_n = max over rows i of (lse_i <= limit ? lse_i : max over visible j of scale · q_i·k_j)
/// which is the largest logit where that exceeds the limit, and otherwise an upper bound of it that
/// does not. The largest of several ranks' or micro-batches' results is that of their tokens
/// together.
///
/// Inputs q A [T, N·D] and lse F32 [N, T], of this rank's tokens, k A [R·T, Nkv·D], those of the
/// ring rank by rank, and cu_seqlens I32 [num_seqs + 1] of all R·T tokens, as make_attention's.
/// Output m F32 [N], the least float where no sequence has a token. No gradient: it is a statistic.
class MaxLogits final : public AttentionOperator {
 public:
  static constexpr std::string_view kName = "max_logits";
  enum Input : int { kQ, kK, kLse, kCuSeqlens };
  enum Output : int { kMax };

  /// Throws UserError as make_attention, or where ring and rank do not fit together.
  explicit MaxLogits(const MaxLogitsSpec& spec);

  float limit() const { return static_cast<float>(limit_); }
  TokenRows rows() const {
    return {.ring = tokens_.ring,
            .rank = rank_,
            .num_rows = tokens_.num_rows,
            .row_length = tokens_.row_length,
            .chunk = tokens_.ring == 1 ? 1 : tokens_.row_length / (2 * tokens_.ring)};
  }
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  double limit_;
  Zigzag tokens_;
  int64_t rank_;
};

/// Of rows without keys.
inline constexpr float kNoLogit = std::numeric_limits<float>::lowest();

OperatorPtr make_max_logits(const MaxLogitsSpec& spec);
void add_max_logits_cpu(KernelTable& table);
/// Rows that no sequence has are left out.
void add_max_logits_cuda(KernelTable& table);

}  // namespace tessera
