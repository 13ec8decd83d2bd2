#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ops/attention/attention_operands.h"
#include "ops/operator.h"

namespace tessera {

/// What an attention layer computes: for query i and visible key j of the same sequence,
///   o_i = sum_j softmax_j(scale · q_i·k_j) v_j,
/// key j being visible where j <= i and, with a window, i - window < j, or with chunks, both are of
/// the same `chunk` positions counted from a multiple of it. Query head n uses
/// key-value head n / (num_heads / num_kv_heads).
struct AttentionSpec {
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t head_size = 64;
  int64_t head_size_v = 0;  ///< 0: head_size
  double scale = 0;         ///< 0: 1 / sqrt(head_size)
  int64_t window = 0;       ///< 0: every earlier token is visible
  /// Of attention over caches; 0: none. Packed sequences are given cut into chunks instead.
  int64_t chunk = 0;
  /// Typical tokens of a sequence (of the cache), for the cost alone; 0: all tokens are one.
  int64_t sequence_length = 0;

  bool operator==(const AttentionSpec&) const = default;
};

/// Causal attention over packed sequences, by tiles with an online softmax (Milakov and Gimelshein
/// 2018; Dao et al., FlashAttention, 2022): the S × S scores are never stored.
///
/// Inputs q A [T, N·D], k A [T, Nkv·D], v A [T, Nkv·Dv], cu_seqlens I32 [num_seqs + 1]: sequence s
/// is the rows cu_seqlens[s] to cu_seqlens[s + 1]; it may be empty. The kernel throws UserError
/// unless cu_seqlens rises from 0 to T. Outputs o A [T, N·Dv] and lse F32 [N, T], the natural
/// logarithm of each row's sum of exponentials. A is F32 or BF16.
///
/// For BF16 on a CPU with BF16 dot products, probabilities are rounded to BF16 before they meet v;
/// all sums and the softmax are F32.
OperatorPtr make_attention(const AttentionSpec& spec);

/// The gradient of make_attention, probabilities computed again from lse. Inputs q, k, v, o, lse,
/// grad_o, cu_seqlens and, where `with_grad_lse`, grad_lse; outputs grad_q, grad_k, grad_v of type
/// A. The same bits for any number of threads. Where k and v are the same memory, a kernel may give
/// the sum of both gradients as grad_k, and zeros as grad_v.
OperatorPtr make_attention_backward(const AttentionSpec& spec, bool with_grad_lse);

/// Attention of new tokens over a cache of keys and values, for generation. Inputs q A [T, N·D],
/// k_cache A [capacity, Nkv·D], v_cache A [capacity, Nkv·Dv], cache_length I32 [1]: the valid rows
/// of the cache, those of the T new tokens (the last of them) included. Output o A [T, N·Dv], with
/// the bits that make_attention gives for these tokens. UserError unless
/// T <= cache_length <= capacity. `gives_lse`: also lse F32 [N, T], as make_attention's. No
/// gradient.
OperatorPtr make_attention_cached(const AttentionSpec& spec, bool gives_lse = false);

/// What the three operators share. `spec` has its defaults filled in.
class AttentionOperator : public Operator {
 public:
  explicit AttentionOperator(const AttentionSpec& spec);
  const AttentionSpec& spec() const { return spec_; }
  int64_t group_size() const { return spec_.num_heads / spec_.num_kv_heads; }
  std::string attributes() const override;

 protected:
  void check_qkv(const ValueType& q, const ValueType& k, const ValueType& v) const;
  /// Forward model FLOPs of one sequence: `num_queries` last of `num_keys` tokens.
  double sequence_flops(double num_queries, double num_keys) const;
  /// Forward model FLOPs of `num_tokens` packed tokens.
  double packed_flops(int64_t num_tokens) const;
  /// The types of o and lse from those of q, k, v and cu_seqlens, with as many queries as keys.
  std::vector<ValueType> infer_forward(std::span<const ValueType> inputs) const;
  /// Those of grad_q, grad_k and grad_v from the inputs of make_attention_backward.
  std::vector<ValueType> infer_backward(std::span<const ValueType> inputs,
                                        bool with_grad_lse) const;
  /// The gradient rule of an operator with the inputs and outputs of make_attention, by a backward
  /// operator with those of make_attention_backward.
  void differentiate_by(GradientBuilder& builder,
                        const std::function<OperatorPtr(bool with_grad_lse)>& make_backward) const;

 private:
  AttentionSpec spec_;
};

class Attention final : public AttentionOperator {
 public:
  static constexpr std::string_view kName = "attention";
  using Input = attention::Input;
  using Output = attention::Output;

  using AttentionOperator::AttentionOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

class AttentionBackward final : public AttentionOperator {
 public:
  static constexpr std::string_view kName = "attention_backward";
  using Input = attention::BackwardInput;
  using Output = attention::BackwardOutput;

  AttentionBackward(const AttentionSpec& spec, bool with_grad_lse);
  bool with_grad_lse() const { return with_grad_lse_; }
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  bool with_grad_lse_;
};

class AttentionCached final : public AttentionOperator {
 public:
  static constexpr std::string_view kName = "attention_cached";
  using Input = attention::CachedInput;
  using Output = attention::Output;

  explicit AttentionCached(const AttentionSpec& spec, bool gives_lse = false)
      : AttentionOperator(spec), gives_lse_(gives_lse) {}
  bool gives_lse() const { return gives_lse_; }
  std::string attributes() const override;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  bool gives_lse_;
};

/// Adds the CPU kernels of the three operators.
void add_attention_cpu(KernelTable& table);
/// Adds those for Hopper GPUs. They read cu_seqlens on the GPU and cannot refuse it there:
/// sequences are cut to the tokens there are, and results of rows that no sequence has are left as
/// they were. attention_cached leaves its output as it was where cache_length does not fit, and has
/// the bits of make_attention in F32 alone.
void add_attention_cuda(KernelTable& table);

}  // namespace tessera
