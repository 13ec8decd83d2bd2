#pragma once

#include "core/zigzag.h"
#include "ops/operator.h"

namespace tessera {

/// Rows of tokens in one of two orders: that of their sequences, or that in which the ranks of a
/// ring have them (core/zigzag.h), one rank's behind the other's. A is F32 or BF16. Each is the
/// other's gradient.
class TokenDeal : public Operator {
 public:
  enum Input : int { kX };
  enum Output : int { kY };

  /// Throws UserError unless each row divides into the ring's chunks; InternalError where
  /// sequences are dealt out one by one.
  explicit TokenDeal(const Zigzag& deal);
  const Zigzag& deal() const { return deal_; }
  /// "rows=2x64 ring=4".
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  Zigzag deal_;
};

/// (x A [T, ...] in the order of the sequences) -> A [T, ...] in that of the ring.
class DealTokens final : public TokenDeal {
 public:
  static constexpr std::string_view kName = "deal_tokens";
  using TokenDeal::TokenDeal;
  std::string_view name() const override { return kName; }
  void differentiate(GradientBuilder& builder) const override;
};

/// The way back: (x A [T, ...] in the order of the ring) -> A [T, ...] in that of the sequences.
class CollectTokens final : public TokenDeal {
 public:
  static constexpr std::string_view kName = "collect_tokens";
  using TokenDeal::TokenDeal;
  std::string_view name() const override { return kName; }
  void differentiate(GradientBuilder& builder) const override;
};

OperatorPtr make_deal_tokens(const Zigzag& deal);
OperatorPtr make_collect_tokens(const Zigzag& deal);
void add_deal_tokens_cpu(KernelTable& table);
void add_deal_tokens_cuda(KernelTable& table);

}  // namespace tessera
