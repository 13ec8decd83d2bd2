#pragma once

#include "ops/attention/attention.h"

namespace tessera {

/// What the tokens of packed sequences see, for the cost alone, where rows are not only keys of
/// tokens: the last `window` tokens, and of each `rate` tokens before an entry, but at most
/// `entries`. Of a window of 0 they see at most as many tokens as are chosen.
struct SparseSight {
  int64_t window = 0;
  int64_t rate = 1;
  int64_t entries = 0;
};

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

  explicit SparseAttention(const AttentionSpec& spec, const SparseSight& sight = {});
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  SparseSight sight_;
};

/// The gradient of SparseAttention: inputs q, k, v, o, lse, grad_o, chosen and, where
/// `with_grad_lse`, grad_lse; outputs grad_q, grad_k, grad_v of type A. The same bits for any
/// number of threads. Where k and v are the same memory, a kernel may give the sum of both
/// gradients as grad_k, and zeros as grad_v.
class SparseAttentionBackward final : public AttentionOperator {
 public:
  static constexpr std::string_view kName = "sparse_attention_backward";
  enum Input : int { kQ, kK, kV, kSavedO, kSavedLse, kGradO, kChosen, kGradLse };
  using Output = attention::BackwardOutput;

  SparseAttentionBackward(const AttentionSpec& spec, bool with_grad_lse,
                          const SparseSight& sight = {})
      : AttentionOperator(spec), with_grad_lse_(with_grad_lse), sight_(sight) {}
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  bool with_grad_lse_;
  SparseSight sight_;
};

OperatorPtr make_sparse_attention(const AttentionSpec& spec, const SparseSight& sight = {});

void add_sparse_attention_cpu(KernelTable& table);
/// In BF16, where a token's heads of one key-value head fill a block, on tensor cores
/// (ops/attention/large_heads.h), which round probabilities and their gradients to BF16. Otherwise
/// plain kernels, a warp for each head of a token, or of a key: right, and slower than attention to
/// all keys where these are few. A chosen row that is not there ends the kernel with an error.
void add_sparse_attention_cuda(KernelTable& table);

}  // namespace tessera
