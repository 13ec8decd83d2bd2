#pragma once

#include <cstdint>

namespace tessera::cuda {

/// Division of integers below 2^31 by one that only the host knows: a multiplication.
/// Source: Granlund and Montgomery, "Division by invariant integers using multiplication", 1994.
class Divider {
 public:
  Divider() = default;  // by one
  /// divisor from 1 to 2^31 - 1.
  explicit Divider(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    const uint64_t power = uint64_t{1} << (31 + shift_);
    multiplier_ = static_cast<uint32_t>((power + divisor - 1) / divisor);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t quotient(uint32_t x) const {
    return divisor_ == 1 ? x : __umulhi(x, multiplier_) >> (shift_ - 1);
  }
  __device__ __forceinline__ uint32_t divisor() const {
    return divisor_;
  }
#endif

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = 0;
  uint32_t shift_ = 0;
};

}  // namespace tessera::cuda
