#pragma once

#include <functional>
#include <string>
#include <vector>

#include "sim/hardware.h"
#include "train/setup/settings.h"

namespace tessera {

/// A model whose steps are timed, as overrides of the configuration: "--model.preset=laptop", ...
struct CalibrationCase {
  std::string name;
  std::vector<std::string> overrides;
};

/// Sizes that cover what ranks of large layouts compute, for one device of the kind.
std::vector<CalibrationCase> calibration_cases(bool on_host);

/// Told which case is next, with the share that is done.
using CalibrationProgress = std::function<void(const std::string& name, double share)>;

/// Times the operators of all cases' steps on this machine's device, and fits what lies between
/// operators and steps. Of the result the rates, links and memory are those of `base`; where it has
/// no rates, they are measured here: those of a large product and of a copy. Cases that do not fit
/// the device's memory are left out. Throws UserError where none can be run.
Hardware calibrate(const Hardware& base, const std::vector<CalibrationCase>& cases,
                   const CalibrationProgress& progress = {});

}  // namespace tessera
