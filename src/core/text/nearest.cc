#include "core/text/nearest.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

namespace tessera {

std::string nearest_divisors(int64_t number, int64_t wanted) {
  wanted = std::max<int64_t>(wanted, 1);
  int64_t below = std::min(wanted, number);
  while (below > 1 && number % below != 0) --below;
  int64_t above = wanted;
  while (above < number && number % above != 0) ++above;
  return above <= number && above != below ? fmt::format("{} or {}", below, above)
                                           : fmt::format("{}", below);
}

std::string nearest_choices(std::vector<int64_t> choices, int64_t wanted) {
  std::ranges::stable_sort(choices, {}, [&](int64_t choice) { return std::abs(choice - wanted); });
  if (choices.size() == 1) return fmt::format("{}", choices[0]);
  return fmt::format("{} or {}", std::min(choices[0], choices[1]),
                     std::max(choices[0], choices[1]));
}

}  // namespace tessera
