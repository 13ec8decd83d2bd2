#pragma once

#include "core/process/progress.h"
#include "hf/convert.h"
#include "train/run/stop_signal.h"

namespace tessera {

/// Shows how far a conversion is, and ends it with a UserError when the user stops the program.
/// Both must outlive the result.
ConvertProgress show_conversion(ProgressBar& bar, const StopSignal& stop);

}  // namespace tessera
