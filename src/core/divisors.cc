#include "core/divisors.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera {

std::string nearest_divisors(int64_t number, int64_t wanted) {
  int64_t below = std::min(wanted, number);
  while (below > 1 && number % below != 0) --below;
  int64_t above = wanted;
  while (above < number && number % above != 0) ++above;
  return above <= number && above != below ? fmt::format("{} or {}", below, above)
                                           : fmt::format("{}", below);
}

}  // namespace tessera
