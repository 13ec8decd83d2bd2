#pragma once

#include "comm/communicator.h"
#include "core/zigzag.h"
#include "ops/attention/attention.h"

namespace tessera {

/// Causal attention over a micro-batch of B rows of S tokens that a ring of R ranks shares as
/// core/zigzag.h says; T = B·S/R are a rank's. Keys and values go around the ring while each rank
/// attends with its own queries to those in hand (Liu et al., "Ring Attention", 2023; zigzag as in
/// Megatron-Core's context parallelism). Partial results are merged by the online softmax itself,
/// so no arithmetic is added, and pairs that no query may see are left out, so all ranks of a ring
/// do the same work.
///
/// Inputs q A [T, N·D], k A [T, Nkv·D], v A [T, Nkv·Dv] of this rank's tokens, and cu_seqlens
/// I32 [num_seqs + 1] of the *whole* micro-batch: sequences of tokens numbered through all rows,
/// which may cross chunks and rows or be empty. The same on all ranks; the kernel throws UserError
/// unless it rises from 0 to B·S. Outputs o A [T, N·Dv] and lse F32 [N, T], as make_attention's.
///
/// A ring of one gives the bits of make_attention. The same bits for any number of threads. A rank
/// sends (R - 1)·T·Nkv·(D + Dv) elements of A, the next block being under way while one is
/// attended to.
///
/// Throws UserError unless S is a multiple of 2R (any S for R = 1).
OperatorPtr make_ring_attention(const AttentionSpec& spec, int64_t num_rows, int64_t row_length,
                                CommunicatorPtr comm);
/// The same where the ring shares sequences one by one (Zigzag::by_sequence), of which there are
/// `num_tokens` together. The kernel throws UserError unless each has a multiple of 2R tokens. For
/// the CPU.
OperatorPtr make_ring_attention_by_sequence(const AttentionSpec& spec, int64_t num_tokens,
                                            CommunicatorPtr comm);

/// Its gradient; inputs and outputs as make_attention_backward's, for this rank's tokens. Keys and
/// values go around again, and behind them the F32 sums of their gradients, each rank adding its
/// share, from the owner's neighbour to the owner, whose own share is added last. A rank sends
/// (R - 1)·T·Nkv·(D + Dv) elements of A and as many of F32.
OperatorPtr make_ring_attention_backward(const AttentionSpec& spec, int64_t num_rows,
                                         int64_t row_length, CommunicatorPtr comm,
                                         bool with_grad_lse);

/// What the two operators share.
class RingAttentionOperator : public AttentionOperator {
 public:
  /// The ring's size is the group's.
  RingAttentionOperator(const AttentionSpec& spec, const Zigzag& tokens, CommunicatorPtr comm);
  const Zigzag& tokens() const { return tokens_; }
  Communicator& comm() const { return *comm_; }
  const CommunicatorPtr& comm_ptr() const { return comm_; }
  std::string attributes() const override;
  bool communicates() const override { return true; }

 protected:
  /// Checks that queries are those of one rank.
  void check_tokens(const ValueType& q) const;
  /// Forward model FLOPs of one rank.
  double rank_flops() const;

 private:
  Zigzag tokens_;
  CommunicatorPtr comm_;
};

class RingAttention final : public RingAttentionOperator {
 public:
  static constexpr std::string_view kName = "ring_attention";
  using Input = attention::Input;
  using Output = attention::Output;

  using RingAttentionOperator::RingAttentionOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

class RingAttentionBackward final : public RingAttentionOperator {
 public:
  static constexpr std::string_view kName = "ring_attention_backward";
  using Input = attention::BackwardInput;
  using Output = attention::BackwardOutput;

  RingAttentionBackward(const AttentionSpec& spec, const Zigzag& tokens, CommunicatorPtr comm,
                        bool with_grad_lse);
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  bool with_grad_lse_;
};

/// Adds the CPU kernels of the two operators.
void add_ring_attention_cpu(KernelTable& table);
/// Adds those for Hopper GPUs. Keys and values are gathered from all ranks before the queries
/// attend to them (Llama 3, section 3.3.2), and F32 sums of their gradients reduce-scattered: as
/// many bytes as around the ring, but scratch memory for those of the whole micro-batch, and
/// nothing beside the attention. Sums are in the order of keys, and over ranks as the
/// communicator's. cu_seqlens that do not rise from 0 to B·S are not refused; results of rows that
/// no sequence has are undefined.
void add_ring_attention_cuda(KernelTable& table);

}  // namespace tessera
