#pragma once

#include "ops/attention/attention.h"

namespace tessera {

/// Attention of each token to some rows of keys and values that were chosen for it (IndexTopk):
///   o_t = sum over the rows j chosen for t of softmax_j(scale · q_t·k_j) v_j.
///
/// Inputs q A [T, N·D], k A [R, Nkv·D], v A [R, Nkv·Dv], chosen I32 [T, K]: rows of k and v, each
/// at most once, behind the last of which a token has -1. Outputs o A [T, N·Dv] and lse F32 [N, T];
/// zeros for tokens without any. A is F32 or BF16; sums are F32, in the order of the rows, and no
/// other token changes them: packed, cached and paged keys give the same bits. `spec` has neither
/// window nor chunks.
class SparseAttention final : public AttentionOperator {
 public:
  static constexpr std::string_view kName = "sparse_attention";
  enum Input : int { kQ, kK, kV, kChosen };
  using Output = attention::Output;

  explicit SparseAttention(const AttentionSpec& spec);
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  /// Keys and values must be as many as queries.
  void differentiate(GradientBuilder& builder) const override;
};

/// The gradient of SparseAttention over the tokens' own keys and values (R = T): inputs q, k, v, o,
/// lse, grad_o, chosen and, where `with_grad_lse`, grad_lse; outputs grad_q, grad_k, grad_v of type
/// A. The same bits for any number of threads.
class SparseAttentionBackward final : public AttentionOperator {
 public:
  static constexpr std::string_view kName = "sparse_attention_backward";
  enum Input : int { kQ, kK, kV, kSavedO, kSavedLse, kGradO, kChosen, kGradLse };
  using Output = attention::BackwardOutput;

  SparseAttentionBackward(const AttentionSpec& spec, bool with_grad_lse)
      : AttentionOperator(spec), with_grad_lse_(with_grad_lse) {}
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  bool with_grad_lse_;
};

OperatorPtr make_sparse_attention(const AttentionSpec& spec);

void add_sparse_attention_cpu(KernelTable& table);
/// Plain kernels, a warp for each head of a token, or of a key: right, and slower than attention to
/// all keys where these are few.
void add_sparse_attention_cuda(KernelTable& table);

}  // namespace tessera
