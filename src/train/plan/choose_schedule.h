#pragma once

#include <optional>
#include <string>

#include "train/plan/search.h"

namespace tessera {

/// What train.schedule = "auto" comes to.
struct ScheduleChoice {
  std::string schedule;         ///< "as_built" or "merged"
  std::string hardware;         ///< that steps were simulated on; empty where none were
  double as_built_seconds = 0;  ///< of a step
  double merged_seconds = 0;    ///< infinite where it cannot be, or does not fit the memory
  std::string why;              ///< where none were simulated, or merged passes cannot be
};

/// Whether passes are merged, by the clock of simulated steps of each pipeline stage's first rank,
/// each with what it computes again so that it fits the memory. Merging must gain more than the
/// simulator errs by between two orders of the same work. Deterministic; a function of settings and
/// hardware alone.
ScheduleChoice choose_schedule(const Settings& settings, int64_t num_ranks,
                               const Hardware& hardware);

/// The same where train.schedule is "auto", on what train.hardware names, or else on what comes
/// with the program for this machine's first GPU. Passes stay as built on a host of which nothing
/// is named, whose cores no description knows, and of one rank. Throws as load_hardware.
std::optional<ScheduleChoice> choose_schedule(const Settings& settings, int64_t num_ranks,
                                              const Backend& backend);

/// What choose_schedule says, put into the settings.
std::optional<ScheduleChoice> apply_schedule(Settings& settings, int64_t num_ranks,
                                             const Backend& backend);
/// The same where nothing is run: with plan_backend's.
std::optional<ScheduleChoice> apply_schedule(Settings& settings, int64_t num_ranks);

std::string describe(const ScheduleChoice& choice);

}  // namespace tessera
