#include "comm/error.h"

#include <fmt/ranges.h>

namespace tessera {

std::string describe(const FailedWait& wait) {
  const std::string missing =
      wait.missing.empty() ? "" : fmt::format(", missing rank {}", fmt::join(wait.missing, " "));
  return fmt::format("rank {} waited {:.1f} s for {} {} of group \"{}\" (ranks {}){}: {}",
                     wait.rank, wait.seconds, comm_kind_name(wait.kind), wait.number, wait.group,
                     fmt::join(wait.ranks, " "), missing, wait.reason);
}

}  // namespace tessera
