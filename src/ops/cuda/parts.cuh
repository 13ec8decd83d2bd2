#pragma once

namespace tessera::cuda {

/// The part that holds `at`, of `count` parts of which part i begins at begin[i]; parts may be
/// empty. REQUIRES begin[0] <= at, and that the parts reach that far.
__device__ __forceinline__ int find_part(const int* begin, int count, int at) {
  int low = 0;
  int high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begin[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace tessera::cuda
