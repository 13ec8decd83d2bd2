#pragma once

#include "ops/compress_windows/compress_windows.h"
#include "ops/paged_attention/kept_rows.h"

namespace tessera {

/// How tokens that go on are compressed.
struct CompressCacheSpec {
  CompressSpec windows = {};
  KeptRows kept = KeptRows::kCached;  ///< kCached or kPaged
  int64_t num_slots = 1;              ///< sequences whose last tokens are kept
  int64_t first_entry = 0;            ///< rows of the cache before those of entries
};

/// CompressWindows of tokens that follow earlier ones, for generation. The state A [slots · 2m,
/// 2·S·D] has kv, and behind it gate, of the last 2m tokens of each slot's sequence, that at
/// position p in row p mod 2m; it is bound from outside as accumulators are, and moves on.
///
/// Inputs kv, gate, bias and positions I32 [T] as those of CompressWindows; for several sequences
/// those of pages (check_kept_inputs) and slots I32 [S]. Outputs, each of T rows, of which those of
/// tokens that end a window count: entries A [T, D]; I32 [T], of the first token of the window the
/// position; I32 [T], the row of the cache where the entry belongs (KeptTokens), -1 for the others.
/// No other sequence changes an entry's bits. No gradient.
class CompressWindowsCached final : public Operator {
 public:
  enum Input : int { kKv, kGate, kBias, kPositions, kFirstKept, kSlots = kFirstKept + 2 };
  enum Output : int { kEntries, kEntryPositions, kEntryRows, kState };

  explicit CompressWindowsCached(const CompressCacheSpec& spec);

  std::string_view name() const override { return name_of(spec_.kept); }
  static std::string_view name_of(KeptRows kept);
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kState; }
  bool recomputable() const override { return false; }
  const CompressCacheSpec& spec() const { return spec_; }

 private:
  CompressCacheSpec spec_;
};

OperatorPtr make_compress_windows_cached(const CompressCacheSpec& spec);
void add_compress_windows_cached_cpu(KernelTable& table);
void add_compress_windows_cached_cuda(KernelTable& table);

}  // namespace tessera
