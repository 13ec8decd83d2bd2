#pragma once

#include "train/setup/device_choice.h"

namespace tessera::testing {

/// A shadow device (ops/testing/shadow_backend.h) for each rank.
RankDevice choose_shadow(const Settings& settings, World& host);
/// The same, which records what it is given and repeats it.
RankDevice choose_recording_shadow(const Settings& settings, World& host);

}  // namespace tessera::testing
