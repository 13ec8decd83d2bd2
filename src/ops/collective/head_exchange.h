#pragma once

#include "ops/collective/collective.h"

namespace tessera {

/// The all-to-all of sequence parallelism by heads (Jacobs et al., "DeepSpeed Ulysses", 2023,
/// section 3.1; MegaScale-MoE, section 3.1): between "some tokens, all heads" and "all tokens, some
/// heads". Rows are tokens, a row is num_heads heads of one size side by side; A is any element
/// type. Each is the other's gradient. num_heads must be a multiple of the ranks, and all ranks
/// have equally many tokens.
class HeadExchange : public CollectiveOperator {
 public:
  /// Throws UserError unless the heads divide over the ranks.
  HeadExchange(CommunicatorPtr comm, int64_t num_heads);
  int64_t num_heads() const { return num_heads_; }
  /// "group=cp size=2 heads=16".
  std::string attributes() const override;
  /// Scratch memory of the kernels of all back ends: the rows in the order of the ranks' parts;
  /// none where the group has one rank.
  int64_t parts_bytes(std::span<const ValueType> inputs) const;

 protected:
  void check_heads(std::span<const ValueType> inputs, int64_t heads_in_row) const;

 private:
  int64_t num_heads_;
};

/// (x A [T, N·D]) -> A [P·T, (N/P)·D]: all ranks' tokens in the order of the ranks, and of each the
/// heads number rank() · N/P and following.
class GatherHeads final : public HeadExchange {
 public:
  static constexpr std::string_view kName = "gather_heads";
  using HeadExchange::HeadExchange;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x A [P·T, (N/P)·D]) -> A [T, N·D]: the way back.
class ScatterHeads final : public HeadExchange {
 public:
  static constexpr std::string_view kName = "scatter_heads";
  using HeadExchange::HeadExchange;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// num_heads is the number of heads of all ranks together, N.
OperatorPtr make_gather_heads(CommunicatorPtr comm, int64_t num_heads);
OperatorPtr make_scatter_heads(CommunicatorPtr comm, int64_t num_heads);

}  // namespace tessera
