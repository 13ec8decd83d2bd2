#pragma once

#include "ops/operator.h"

namespace tessera {

/// What tokens see of their sequences: a window, and entries that whole tokens were compressed to
/// (CompressWindows).
struct WindowChoiceSpec {
  int64_t window = 1;   ///< W, the last so many tokens, the own one included
  int64_t rate = 1;     ///< m, tokens of an entry
  int64_t entries = 1;  ///< K, entries that a token sees at most: all, or those chosen

  bool operator==(const WindowChoiceSpec&) const = default;
};

/// The rows that each token attends to (SparseAttention) of keys that are the T tokens' own, behind
/// which lie the entries: those of its window, then those of the entries of whole windows of m
/// tokens that end with it or before (DeepSeek-V4: DeepSeek-AI, 2026, section 2.3). So a token at
/// position p of its sequence sees of that the first (p + 1) / m entries, rounded down, but of
/// `chosen` ones only those.
///
/// Inputs positions I32 [T] of tokens in their sequences and, with `chosen`, I32 [T, K]: rows of
/// entries, behind the last of which a token has -1. Output I32 [T, W + K], -1 behind the last row.
/// It has no gradient.
class WindowChoice final : public Operator {
 public:
  static constexpr std::string_view kName = "window_choice";
  enum Input : int { kPositions, kChosen };
  enum Output : int { kRows };

  /// Throws UserError unless all numbers are at least 1.
  WindowChoice(const WindowChoiceSpec& spec, bool chosen);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  const WindowChoiceSpec& spec() const { return spec_; }
  bool chosen() const { return chosen_; }

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
