#pragma once

#include <cstdint>

#include "train/setup/settings.h"

namespace tessera {

/// Whether a check asks for memory too: not where the settings are of another machine.
enum class FitCheck : uint8_t { kMachine, kNone };

/// Refuses a model that cannot be built or trained as the settings say on `num_ranks` ranks and
/// this machine, before any data is read or written.
void check_model(Settings settings, int64_t num_ranks, FitCheck fit = FitCheck::kMachine);
/// The same where model.vocab_size is set, without a tokenizer.
void check_sized_model(Settings settings, int64_t num_ranks, FitCheck fit = FitCheck::kMachine);

}  // namespace tessera
