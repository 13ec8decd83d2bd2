#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

/// The sanitizers take ten times as long: with them, of cases that differ in layout or options
/// alone, a third runs. Without them all do.
namespace tessera::testing {

#ifdef TESSERA_SANITIZED
inline constexpr size_t kCaseShare = 3;
#else
inline constexpr size_t kCaseShare = 1;
#endif

/// The cases from number `first` on that run; other suites take others.
template <typename Cases>
auto share_of_cases(const Cases& all, size_t first) {
  std::vector<typename Cases::value_type> some;
  for (size_t i = first % kCaseShare; i < all.size(); i += kCaseShare) some.push_back(all[i]);
  return some;
}

/// How many of `count` random cases run; also what they come to at least.
template <typename Count>
constexpr Count share_of_count(Count count) {
  return count / static_cast<Count>(kCaseShare);
}

/// The same of cases of which each takes seconds: a ninth, but one at least.
template <typename Count>
constexpr Count few_of_count(Count count) {
  if constexpr (kCaseShare == 1) return count;
  return std::max<Count>(1, count / static_cast<Count>(kCaseShare * kCaseShare));
}

/// And the cases themselves.
template <typename Cases>
auto few_of_cases(const Cases& all) {
  return share_of_cases(share_of_cases(all, 0), 0);
}

}  // namespace tessera::testing
