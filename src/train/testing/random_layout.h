#pragma once

#include <cstdint>

#include "train/settings.h"

namespace tessera::testing {

/// A random small model on a random layout of at most `max_ranks` ranks, of every family of options
/// that layouts meet: a pure function of the seed.
struct RandomLayout {
  Settings settings;
  int64_t num_ranks = 1;
};

RandomLayout draw_layout(uint64_t seed, int64_t max_ranks);

/// "tp 2 cp 1 ...; experts 8 top 2 ...", for messages.
std::string describe(const RandomLayout& layout);

}  // namespace tessera::testing
