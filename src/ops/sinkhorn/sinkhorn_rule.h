#pragma once

#include <cstdint>

/// What CPUs and GPUs iterate alike.
namespace tessera {

/// The iteration ends where the experts' factors, 1 on average where all are alike, change by no
/// more than this on average, and after so many steps in any case.
inline constexpr double kSinkhornTolerance = 1e-4;
inline constexpr int kSinkhornSteps = 100;
/// Beside the sums that are divided by.
inline constexpr double kSinkhornEpsilon = 1e-8;

/// Tokens whose sums by expert are taken together, whatever the number of threads.
inline constexpr int64_t kSinkhornBlock = 32;
inline constexpr int64_t sinkhorn_blocks(int64_t num_tokens) {
  return (num_tokens + kSinkhornBlock - 1) / kSinkhornBlock;
}

}  // namespace tessera
