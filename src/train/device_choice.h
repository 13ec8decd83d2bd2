#pragma once

#include <cstdint>

#include "ops/backend.h"
#include "train/settings.h"

namespace tessera {

/// Where a run of `num_ranks` ranks computes: the GPU where the settings say so, or where they
/// leave it open and one can be used; else the host. Throws UserError where a GPU is asked for and
/// cannot be had.
Backend choose_backend(const Settings& settings, int64_t num_ranks);

}  // namespace tessera
