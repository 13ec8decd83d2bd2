#pragma once

#include <omp.h>

namespace tessera {

/// From this many threads on, work is cut into more parts than threads, each for one of them: after
/// a product that all threads compute together all wait for the slowest, and on a machine that
/// others use too one of many is always slow.
inline bool has_many_threads() {
  constexpr int kMany = 8;
  return omp_get_max_threads() >= kMany;
}

}  // namespace tessera
