#include "cli/conversion_progress.h"

#include <algorithm>

#include "core/error.h"

namespace tessera {

ConvertProgress show_conversion(ProgressBar& bar, const StopSignal& stop) {
  return [&bar, &stop](std::string_view stage, int64_t done, int64_t total) {
    require(stop.received() == 0, "interrupted; nothing was kept");
    bar.update(static_cast<double>(done) / static_cast<double>(std::max<int64_t>(total, 1)), stage);
  };
}

}  // namespace tessera
