#pragma once

#include <cstdint>

#include "ops/backend.h"
#include "train/settings.h"

namespace tessera {

/// Refuses settings that ask for a GPU that a run of `num_ranks` ranks cannot have. Takes nothing
/// of the GPU, so it may be called before anything else is done.
void check_device(const Settings& settings, int64_t num_ranks);
/// Where a run of `num_ranks` ranks computes: the GPU where the settings say so, or where they
/// leave it open and one can be used; else the host. Throws as check_device.
Backend choose_backend(const Settings& settings, int64_t num_ranks);
/// The same to plan with: nothing can run on it where it is a GPU's. Settings that ask for a GPU
/// give one that need not be there.
Backend plan_backend(const Settings& settings, int64_t num_ranks);
/// Bytes of memory of the GPU that choose_backend takes; 0 where there is none.
int64_t gpu_memory();

}  // namespace tessera
