#pragma once

#include <string>
#include <vector>

#include "train/setup/layout_proof.h"

namespace tessera {

/// A layout checked without running it.
struct StaticVerification {
  struct Stage {
    int64_t first_rank = 0;
    std::string axes;  ///< "dp 4, tp 2; ep 8, edp 1"
    std::vector<ProvenProgram> programs;
  };
  std::vector<Stage> stages;  ///< those that run different programs
  int64_t num_ranks = 1;
  int64_t num_stages = 1;
  int64_t num_checked = 0;  ///< ranks whose groups and reductions were looked at
  ShardingFaults faults;
  double seconds = 0;

  bool agrees() const { return faults.empty(); }
  int64_t num_programs() const;
  int64_t num_values() const;
};

/// Follows every value of every program that some pipeline stage runs, at the configuration's own
/// size and with the kernels of the device that training would have (prove_rank), and looks at the
/// groups and reductions of all ranks, or of 512 among more. Throws UserError for a layout that
/// cannot run.
StaticVerification verify_static(const Settings& settings, int64_t num_ranks);

/// For a person: what was proven or the faults; `all`: how each value is spread.
std::string describe(const StaticVerification& verification, bool all);

}  // namespace tessera
