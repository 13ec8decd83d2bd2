#pragma once

#include "ops/operator.h"

namespace tessera {

/// How tokens are compressed.
struct CompressSpec {
  int64_t rate = 4;  ///< m, tokens from one entry to the next
  /// An entry is also made of the m tokens before its own, of which it takes other elements.
  bool overlaps = false;

  /// Parts that tokens' rows have: one for their own entry, and where entries overlap before it one
  /// for the next.
  int64_t parts() const { return overlaps ? 2 : 1; }
  bool operator==(const CompressSpec&) const = default;
};

/// Compresses each whole window of m tokens of a sequence, counted from its first, to one entry
/// (DeepSeek-V4: DeepSeek-AI, 2026, section 2.3.2, equations 20 to 23; with `overlaps` section
/// 2.3.1, equations 9 to 12): of each element c
///
///   entry[c] = sum over j of softmax_j(gate[j, c] + bias[j, c]) · kv[j, c]
///
/// where j goes over the window's tokens or, with `overlaps`, over the first D elements of those of
/// the window before it, where the sequence has one, and the last D of its own.
///
/// Inputs kv A [T, S·D] and gate A [T, S·D], of S parts; bias F32 [m, S·D]; positions I32 [T]: of
/// tokens in their sequences, whose first ones have 0. Outputs entries A [E, D] and I32 [E]: of the
/// first token of its window the position; E = max(T / m, 1). Entry w of the sequence that begins
/// with token b lies in row b / m + w, rounded down: sequences have rows of their own, whatever
/// their lengths. Rows without an entry are 0. A is F32 or BF16; sums are F32.
class CompressWindows final : public Operator {
 public:
  static constexpr std::string_view kName = "compress_windows";
  enum Input : int { kKv, kGate, kBias, kPositions };
  enum Output : int { kEntries, kEntryPositions };

  /// Throws UserError unless the rate is at least 1.
  explicit CompressWindows(const CompressSpec& spec);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  const CompressSpec& spec() const { return spec_; }

 private:
  CompressSpec spec_;
};

/// (kv, gate, bias, positions as above, grad of entries A [E, D]) -> (grad of kv, of gate, both
/// A [T, S·D], and of bias F32 [m, S·D], accumulated over the windows in an order that the number
/// of tokens alone decides). Weights of the sums are found again.
class CompressWindowsBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "compress_windows_backward";
  enum Input : int { kKv, kGate, kBias, kPositions, kGrad };
  enum Output : int { kGradKv, kGradGate, kGradBias };

  explicit CompressWindowsBackward(const CompressWindows& forward) : forward_(forward) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return forward_.attributes(); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kGradBias; }
  const CompressSpec& spec() const { return forward_.spec(); }

 private:
  CompressWindows forward_;
};

/// Rows of entries that so many tokens may have.
int64_t num_entry_rows(int64_t num_tokens, int64_t rate);

OperatorPtr make_compress_windows(const CompressSpec& spec);
void add_compress_windows_cpu(KernelTable& table);
/// Positions outside the tokens before end the program's work on the GPU.
void add_compress_windows_cuda(KernelTable& table);

}  // namespace tessera
