#pragma once

#include <cstdint>
#include <limits>

namespace tessera {

/// A count of at least 0 that stays at the largest int64_t where a sum or product would exceed it,
/// so that the sizes of any configuration can be multiplied first and judged then.
class Saturating {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): it stands for the number
  constexpr Saturating(int64_t value) : value_(value) {}
  constexpr int64_t value() const { return value_; }

  friend constexpr Saturating operator+(Saturating a, Saturating b) {
    int64_t sum = 0;
    return __builtin_add_overflow(a.value_, b.value_, &sum) ? kMost : sum;
  }
  friend constexpr Saturating operator*(Saturating a, Saturating b) {
    int64_t product = 0;
    return __builtin_mul_overflow(a.value_, b.value_, &product) ? kMost : product;
  }
  friend constexpr Saturating operator/(Saturating a, int64_t b) { return a.value_ / b; }
  constexpr Saturating& operator+=(Saturating other) { return *this = *this + other; }

 private:
  static constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

  int64_t value_;
};

}  // namespace tessera
