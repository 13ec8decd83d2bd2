#pragma once

#include "ops/operator.h"
#include "ops/paged_attention/kept_rows.h"

namespace tessera {

/// What tokens see of their sequences: a window, and entries that whole tokens were compressed to
/// (CompressWindows).
struct WindowChoiceSpec {
  int64_t window = 1;   ///< W, the last so many tokens, the own one included
  int64_t rate = 1;     ///< m, tokens of an entry
  int64_t entries = 1;  ///< K, entries that a token sees at most: all, or those chosen
  /// Keys and entries are of the tokens in hand, or kept.
  KeptRows kept = KeptRows::kPacked;
  int64_t first_entry = 0;  ///< rows of keys before those of entries, where they are kept

  bool operator==(const WindowChoiceSpec&) const = default;
};

/// The rows that each token attends to (SparseAttention) of keys that are the T tokens' own, behind
/// which lie the entries: those of its window, then those of the entries of whole windows of m
/// tokens that end with it or before (DeepSeek-V4: DeepSeek-AI, 2026, section 2.3). So a token at
/// position p of its sequence sees of that the first (p + 1) / m entries, rounded down, but of
/// `chosen` ones only those.
///
/// Inputs positions I32 [T] of tokens in their sequences; those of pages (check_kept_inputs); and,
/// with `chosen`, I32 [T, K]: rows of entries, behind the last of which a token has -1. Output I32
/// [T, W + K], -1 behind the last row. Entries that are kept lie as KeptTokens has them, behind
/// first_entry rows. It has no gradient.
class WindowChoice final : public Operator {
 public:
  enum Input : int { kPositions, kFirstKept };
  enum Output : int { kRows };

  /// Throws UserError unless all numbers are at least 1.
  WindowChoice(const WindowChoiceSpec& spec, bool chosen);

  std::string_view name() const override { return name_of(spec_.kept); }
  static std::string_view name_of(KeptRows kept);
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  const WindowChoiceSpec& spec() const { return spec_; }
  bool chosen() const { return chosen_; }
  /// The input of chosen entries. REQUIRES chosen().
  int chosen_input() const { return kFirstKept + num_kept_inputs(spec_.kept); }

 private:
  WindowChoiceSpec spec_;
  bool chosen_;
};

OperatorPtr make_window_choice(const WindowChoiceSpec& spec, bool chosen);
void add_window_choice_cpu(KernelTable& table);
/// Positions outside the tokens before, and sequences with more entries than the operator's, end
/// the program's work on the GPU.
void add_window_choice_cuda(KernelTable& table);

}  // namespace tessera
