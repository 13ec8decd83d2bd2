#pragma once

#include "ops/operator.h"
#include "ops/page_stash/page_pool.h"

namespace tessera {

/// Pages of a value at its bound.
int64_t most_pages(const ValueType& value, const PagePool& pool);

/// Copies of ragged values between their places and the pages of a pool, in place, as accumulators
/// are.
class PageCopy : public Operator {
 public:
  /// Throws UserError for pages that are no multiples of 16 bytes.
  explicit PageCopy(const PagePool& pool);
  const PagePool& pool() const { return pool_; }
  /// "pages=64 x 2048 B".
  std::string attributes() const override;
  bool accumulates(int /*output*/) const override { return true; }
  bool recomputable() const override { return false; }

 private:
  PagePool pool_;
};

/// Copies the rows of a ragged value into pages of a pool (paged stashing, Megatron-Core MoE,
/// section 4.3.7; here a page is of bytes, so that values of any width share a pool). The number of
/// rows is known to the device alone.
///
/// Input value [N <= bound, ...], ragged in its first dim. In place, as accumulators are: the
/// pool's bytes U8 [num_pages * page_bytes], its free pages I32 [num_pages], of which the first
/// kFreePages are free and the last of those is taken first, its state I64 [kPoolStates], and the
/// value's table I32 [most_pages], which says where page i of its bytes is. Where too few are free,
/// none is taken, the table begins with -1, and kMissingPages says how many were missing. No
/// gradient.
class StashPages final : public PageCopy {
 public:
  static constexpr std::string_view kName = "stash_pages";
  enum Input : int { kValue };
  enum Output : int { kPages, kFree, kState, kTable };

  using PageCopy::PageCopy;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

/// Copies the rows back and frees their pages, in the order in which they were taken: what was
/// stashed last is taken first again.
///
/// Input rows I64 [1]. In place: the value, of the type that was stashed, and pool, free pages,
/// state and table as StashPages leaves them. A value that found no room becomes NaN where it is of
/// floats, so that no step is made of it, and 0 elsewhere. No gradient.
class ReloadPages final : public PageCopy {
 public:
  static constexpr std::string_view kName = "reload_pages";
  enum Input : int { kRows };
  enum Output : int { kValue, kPages, kFree, kState, kTable };

  /// `value` is ragged in its first dim, whose extent the input is.
  ReloadPages(const PagePool& pool, const ValueType& value);
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  ValueType value_;
};

OperatorPtr make_stash_pages(const PagePool& pool);
OperatorPtr make_reload_pages(const PagePool& pool, const ValueType& value);

void add_page_stash_cpu(KernelTable& table);
void add_page_stash_cuda(KernelTable& table);

}  // namespace tessera
