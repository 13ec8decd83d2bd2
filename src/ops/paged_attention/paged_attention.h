#pragma once

#include "ops/attention/attention.h"
#include "ops/paged_attention/pages.h"

namespace tessera {

/// Writes new tokens' keys or values into pages, in place.
///
/// Inputs rows A [T, C] and cache_rows I32 [T]; the output is the cache A [capacity, C], F32 or
/// BF16, bound from outside as accumulators are. Row cache_rows[t] of the cache becomes rows[t]; -1
/// writes nothing, other rows of the cache stay. UserError for a row that the cache has not. No
/// gradient.
class PageWrite final : public Operator {
 public:
  static constexpr std::string_view kName = "page_write";
  enum Input : int { kRows, kCacheRows };
  enum Output : int { kCache };

  explicit PageWrite(int64_t capacity);
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
  bool recomputable() const override { return false; }

 private:
  int64_t capacity_;
};

/// Attention of several sequences' new tokens over their pages of keys and values (PagedAttention:
/// Kwon et al. 2023, section 4.1), for generation.
///
/// Inputs q A [T, N·D], key pages A [P·kPageTokens, Nkv·D], value pages A [P·kPageTokens, Nkv·Dv],
/// cu_seqlens I32 [S + 1], lengths I32 [S], page_table I32 [S, M]. Rows cu_seqlens[s] to
/// cu_seqlens[s + 1] of q are the last tokens of sequence s, which has lengths[s] of them; token p
/// is row p mod kPageTokens of page page_table[s, p / kPageTokens]. Outputs o A [T, N·Dv] and lse
/// F32 [N, T], with the bits that make_attention gives for these tokens (with chunks that are not
/// whole pages, but for rounding); zeros for the rows after cu_seqlens[S]. UserError where bounds
/// fall, a sequence is longer than M pages or shorter than its new tokens, or a page is not there.
/// No gradient.
class PagedAttention final : public AttentionOperator {
 public:
  static constexpr std::string_view kName = "paged_attention";
  enum Input : int { kQ, kKeyPages, kValuePages, kCuSeqlens, kLengths, kPageTable };
  using Output = attention::Output;

  using AttentionOperator::AttentionOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

OperatorPtr make_page_write(int64_t capacity);
OperatorPtr make_paged_attention(const AttentionSpec& spec);

void add_paged_attention_cpu(KernelTable& table);
/// The kernels for Hopper GPUs find out on the GPU what the CPU's refuse, and end the program's
/// work there: the next synchronisation throws. A token's bits depend on its own sequence, and the
/// table's width, alone; they are not those of make_attention.
void add_paged_attention_cuda(KernelTable& table);

}  // namespace tessera
