#pragma once

#include <cstdint>

namespace tessera {

// The largest sizes that can be asked for: beyond what any model has, and so small that a product
// of two of them fits 64 bits. Products of more are counted by Saturating.

/// Of the hidden size, inner sizes, latents and the elements of a head.
inline constexpr int64_t kMaxWidth = int64_t{1} << 20;
inline constexpr int64_t kMaxHeads = int64_t{1} << 16;
inline constexpr int64_t kMaxLayers = int64_t{1} << 14;
inline constexpr int64_t kMaxExperts = int64_t{1} << 16;
inline constexpr int64_t kMaxVocabulary = int64_t{1} << 24;
/// Tokens of a sequence.
inline constexpr int64_t kMaxLength = int64_t{1} << 24;
/// Sequences of a micro-batch or of a step.
inline constexpr int64_t kMaxSequences = int64_t{1} << 20;
/// Of the stash: a page's rows, and its room as a multiple of what balanced routing needs.
inline constexpr int64_t kMaxStashPage = int64_t{1} << 20;
inline constexpr double kMaxStashFactor = 1 << 20;
/// Tokens of a micro-batch, and rows that they are sent to experts as: kernels number both in 32
/// bits.
inline constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;
inline constexpr int64_t kMaxSteps = 1'000'000'000'000;
/// Of a model: a thousand times the largest there are.
inline constexpr int64_t kMaxParameters = int64_t{1} << 50;
/// Standard deviation of initial weights. Norms divide by the root of squares, which must not
/// overflow, and add an epsilon that must not hide the weights' gradients.
inline constexpr double kMinDeviation = 1e-8;
inline constexpr double kMaxDeviation = 10.0;
/// Of hidden states, scores and logits: products with them stay numbers.
inline constexpr double kMinMultiplier = 1e-6;
inline constexpr double kMaxMultiplier = 1e6;

}  // namespace tessera
