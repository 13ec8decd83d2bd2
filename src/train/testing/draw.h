#pragma once

#include <fmt/ranges.h>

#include <string>
#include <utility>
#include <vector>

#include "core/random.h"

namespace tessera::testing {

/// Draws of one case.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed, 4242) {}

  int64_t upto(int64_t count) {
    return static_cast<int64_t>(random_.next_below(static_cast<uint64_t>(count)));
  }
  bool chance(int64_t in) { return upto(in) == 0; }
  template <typename T>
  T of(std::initializer_list<T> choices) {
    return *(choices.begin() + upto(std::ssize(choices)));
  }
  int64_t divisor(int64_t number) {
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= number; ++d) {
      if (number % d == 0) divisors.push_back(d);
    }
    return divisors[upto(std::ssize(divisors))];
  }
  std::string order(std::vector<std::string> axes) {
    for (size_t i = axes.size(); i > 1; --i)
      std::swap(axes[i - 1], axes[upto(static_cast<int64_t>(i))]);
    return fmt::format("{}", fmt::join(axes, "-"));
  }

 private:
  Random random_;
};

}  // namespace tessera::testing
