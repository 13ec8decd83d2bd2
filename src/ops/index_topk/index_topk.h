#pragma once

#include "ops/operator.h"
#include "ops/paged_attention/kept_rows.h"

namespace tessera {

/// The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2: DeepSeek-AI, 2025, section 2.1).
struct IndexSpec {
  int64_t num_heads = 1;   ///< H, of the index queries; all read one key
  int64_t head_size = 64;  ///< D
  int64_t top_k = 1;       ///< K, keys that a token attends to at most
  /// Typical tokens of a sequence (of the cache), for the cost alone; 0: all tokens are one.
  int64_t sequence_length = 0;

  bool operator==(const IndexSpec&) const = default;
};

/// Which keys each token attends to: of those that it sees, which are its sequence's up to itself,
/// the K with the largest scores
///
///   score(t, s) = sum over h of weights[t, h] · max(0, q[t, h] · k[s]),
///
/// of equal ones the nearest. Positive factors, which change no choice, are left out.
///
/// Inputs q A [T, H·D], weights A [T, H], k A [R, D] and what says where the keys are; output I32
/// [T, K], rows of k in the order of their positions, then -1 where a token sees fewer. A is F32 or
/// BF16; scores are F32, summed in an order that no other token changes. The choice has no
/// gradient, and is kept for the backward pass, which depends on it.
class IndexTopkOperator : public Operator {
 public:
  enum Input : int { kQ, kWeights, kKeys, kFirstBound };
  enum Output : int { kChosen };

  explicit IndexTopkOperator(const IndexSpec& spec);
  const IndexSpec& spec() const { return spec_; }
  std::string attributes() const override;
  bool recomputable() const override { return false; }

 protected:
  /// The type of the choice, of inputs of which there are `num_bounds` behind the keys.
  std::vector<ValueType> infer_choice(std::span<const ValueType> inputs, int num_bounds) const;
  void check_i32(const ValueType& type, const Shape& shape, const char* what) const;
  /// FLOPs of the scores of the last `num_queries` of `num_keys` tokens of a sequence: those that
  /// see K keys or fewer need none.
  double score_flops(double num_queries, double num_keys) const;
  /// Tokens of a sequence of at most `longest`.
  int64_t typical_length(int64_t longest) const;

 private:
  IndexSpec spec_;
};

/// Of packed sequences: cu_seqlens I32 [S + 1], whose rows of q and k are the same tokens.
class IndexTopk final : public IndexTopkOperator {
 public:
  static constexpr std::string_view kName = "index_topk";
  enum Bound : int { kCuSeqlens = kFirstBound };

  using IndexTopkOperator::IndexTopkOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

/// Of one sequence's new tokens over its cache k A [capacity, D]: cache_length I32 [1], the tokens
/// of the cache, the new ones, which are the last, included.
class IndexTopkCached final : public IndexTopkOperator {
 public:
  static constexpr std::string_view kName = "index_topk_cached";
  enum Bound : int { kCacheLength = kFirstBound };

  using IndexTopkOperator::IndexTopkOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

/// Of several sequences' new tokens over pages of keys, as PagedAttention reads them: cu_seqlens
/// I32 [S + 1], lengths I32 [S], page_table I32 [S, M]. Rows after cu_seqlens[S] choose nothing.
class IndexTopkPaged final : public IndexTopkOperator {
 public:
  static constexpr std::string_view kName = "index_topk_paged";
  enum Bound : int { kCuSeqlens = kFirstBound, kLengths, kPageTable };

  using IndexTopkOperator::IndexTopkOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

/// Over entries that `rate` tokens each were compressed to (CompressWindows), which lie in k A
/// [R, D] as there, or as they are kept (KeptTokens): positions I32 [T] of the tokens in their
/// sequences, of whose entries a token at position p sees the first (p + 1) / rate, rounded down;
/// and the inputs of pages (check_kept_inputs).
class IndexTopkEntries final : public IndexTopkOperator {
 public:
  enum Bound : int { kPositions = kFirstBound, kFirstKept };

  /// Throws UserError unless the rate is at least 1.
  IndexTopkEntries(const IndexSpec& spec, int64_t rate, KeptRows kept = KeptRows::kPacked);
  std::string_view name() const override { return name_of(kept_); }
  static std::string_view name_of(KeptRows kept);
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  int64_t rate() const { return rate_; }
  KeptRows kept() const { return kept_; }

 private:
  int64_t rate_;
  KeptRows kept_;
};

OperatorPtr make_index_topk(const IndexSpec& spec);
OperatorPtr make_index_topk_entries(const IndexSpec& spec, int64_t rate,
                                    KeptRows kept = KeptRows::kPacked);
OperatorPtr make_index_topk_cached(const IndexSpec& spec);
OperatorPtr make_index_topk_paged(const IndexSpec& spec);

void add_index_topk_cpu(KernelTable& table);
/// The kernels for GPUs find out on the GPU what the CPU's refuse of caches, and end the program's
/// work there; packed sequences are cut to the tokens there are. Scores that are all but equal on
/// the CPU may be in another order.
void add_index_topk_cuda(KernelTable& table);

}  // namespace tessera
