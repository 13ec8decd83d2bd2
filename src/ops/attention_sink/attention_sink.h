#pragma once

#include "ops/operator.h"

namespace tessera {

/// How an attention operator's heads lie among the learnt sinks.
struct AttentionSinkSpec {
  int64_t num_heads = 1;   ///< N, of the attention's output
  int64_t num_sinks = 1;   ///< S, of the weight: at least first_head + num_heads
  int64_t first_head = 0;  ///< the sink of the output's first head

  bool operator==(const AttentionSinkSpec&) const = default;
};

/// Attention sinks: a learnt logit s of each head joins the denominator of the softmax, so that a
/// query may attend to nothing (gpt-oss; Xiao et al., "Efficient Streaming Language Models with
/// Attention Sinks", 2024, section 3.3, with a value of zero). With o and lse of attention without
/// sinks,
///
///     o'[t, n] = o[t, n] · sigmoid(lse[n, t] - s[n]).
///
/// (o A [T, N·Dv], lse F32 [N, T], sinks F32 [S]) -> A [T, N·Dv], A F32 or BF16. Sums are F32. No
/// dim may be ragged.
class AttentionSink final : public Operator {
 public:
  static constexpr std::string_view kName = "attention_sink";
  enum Input : int { kO, kLse, kSinks };
  enum Output : int { kY };

  /// Throws UserError where the heads are not among the sinks.
  explicit AttentionSink(const AttentionSinkSpec& spec);

  const AttentionSinkSpec& spec() const { return spec_; }
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  AttentionSinkSpec spec_;
};

/// (grad A [T, N·Dv], o, lse, sinks) -> (grad_o A [T, N·Dv], grad_lse F32 [N, T], grad_sinks
/// F32 [S] accumulated). Tokens are added up in a fixed order, the same for any number of threads.
class AttentionSinkBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "attention_sink_backward";
  enum Input : int { kGrad, kO, kLse, kSinks };
  enum Output : int { kGradO, kGradLse, kGradSinks };

  explicit AttentionSinkBackward(const AttentionSink& forward) : forward_(forward) {}

  const AttentionSinkSpec& spec() const { return forward_.spec(); }
  std::string_view name() const override { return kName; }
  std::string attributes() const override { return forward_.attributes(); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kGradSinks; }

 private:
  AttentionSink forward_;
};

OperatorPtr make_attention_sink(const AttentionSinkSpec& spec);

void add_attention_sink_cpu(KernelTable& table);
void add_attention_sink_cuda(KernelTable& table);

}  // namespace tessera
