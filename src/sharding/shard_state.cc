#include "sharding/shard_state.h"

#include <fmt/format.h>

namespace tessera {

std::string_view rank_axis_name(RankAxis axis) {
  constexpr std::array<std::string_view, kNumRankAxes> kNames = {
      "tp copies", "tp", "cp heads", "cp ring", "dp", "etp", "ep", "ep nodes", "edp"};
  return kNames[static_cast<size_t>(axis)];
}

ShardState ShardState::dual() const {
  if (kind == Kind::kReplicated) return partial();
  if (kind == Kind::kPartial) return replicated();
  return *this;
}

std::string ShardState::to_string() const {
  switch (kind) {
    case Kind::kReplicated:
      return "R";
    case Kind::kSharded:
      return fmt::format("S{}", dim);
    case Kind::kByExpert:
      return fmt::format("E{}", dim);
    case Kind::kPartial:
      return "P";
    case Kind::kVarying:
      break;
  }
  return "V";
}

Sharding Sharding::dual() const {
  Sharding result = *this;
  for (ShardState& state : result.states) state = state.dual();
  return result;
}

}  // namespace tessera
