#pragma once

#include "ops/operator.h"
#include "ops/page_stash/page_pool.h"

namespace tessera {

/// Pages of so many bytes that so many rows of a value take, at most those of its bound.
int64_t pages_of_rows(const ValueType& value, int64_t rows, int64_t page_bytes);
/// At its bound.
int64_t most_pages(const ValueType& value, int64_t page_bytes);

/// Copies of ragged values between their places and the pages of a pool, which are changed in
/// place, as accumulators are: its bytes U8 [page_bytes], its free pages I32 [1] and its state I64
/// [kPoolStates]. How many pages there are the state says alone, so a pool may grow: of the first
/// two a program knows the first page, behind which the others are.
class PageCopy : public Operator {
 public:
  /// Throws UserError for pages that are no multiples of 16 bytes.
  explicit PageCopy(int64_t page_bytes);
  int64_t page_bytes() const { return page_bytes_; }
  /// "page=2048 B".
  std::string attributes() const override;
  bool recomputable() const override { return false; }

 private:
  int64_t page_bytes_;
};

/// Copies the rows of a ragged value into pages of a pool (paged stashing, Megatron-Core MoE,
/// section 4.3.7; here a page is of bytes, so that values of any width share a pool). The number of
/// rows is known to the device alone.
///
/// Input value [N <= bound, ...], ragged in its first dim. In place the pool, of whose free pages
/// the first kFreePages are free and the last of those is taken first. Output table I32
/// [most_pages], which says where page i of the value's bytes is. Where too few are free, none is
/// taken, the table begins with -1, and kMissingPages says how many were missing. No gradient.
class StashPages final : public PageCopy {
 public:
  static constexpr std::string_view kName = "stash_pages";
  enum Input : int { kValue };
  enum Output : int { kPages, kFree, kState, kTable };

  using PageCopy::PageCopy;
  std::string_view name() const override { return kName; }
  bool accumulates(int output) const override { return output != kTable; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

/// Copies the rows back and frees their pages, in the order in which they were taken: what was
/// stashed last is taken first again.
///
/// Inputs rows I64 [1], table as StashPages gave it; a table is read once. Output value, of the
/// type that was stashed; in place the pool. A value that found no room becomes NaN where it is of
/// floats, and 0 elsewhere: whoever makes a step of it must look at kMissingPages. No gradient.
class ReloadPages final : public PageCopy {
 public:
  static constexpr std::string_view kName = "reload_pages";
  enum Input : int { kRows, kTable };
  enum Output : int { kPages, kFree, kState, kValue };

  /// `value` is ragged in its first dim, whose extent the input is.
  ReloadPages(int64_t page_bytes, const ValueType& value);
  std::string_view name() const override { return kName; }
  bool accumulates(int output) const override { return output != kValue; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  ValueType value_;
};

OperatorPtr make_stash_pages(int64_t page_bytes);
OperatorPtr make_reload_pages(int64_t page_bytes, const ValueType& value);

void add_page_stash_cpu(KernelTable& table);
void add_page_stash_cuda(KernelTable& table);

}  // namespace tessera
