#pragma once

#include <cstdint>

namespace tessera {

/// A thread or vector of either kernel keeps a sum for each pair of them.
inline constexpr int64_t kMaxMixedStreams = 8;

/// Calls run.template operator()<n>() for n streams, from 1 to kMaxMixedStreams.
template <int kStreams = 1, typename Run>
void with_mixed_streams(int64_t streams, Run run) {
  if constexpr (kStreams <= kMaxMixedStreams) {
    if (streams == kStreams) return run.template operator()<kStreams>();
    with_mixed_streams<kStreams + 1>(streams, run);
  }
}

}  // namespace tessera
