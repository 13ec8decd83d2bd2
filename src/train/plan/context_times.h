#pragma once

#include <map>

#include "core/zigzag.h"
#include "data/sampler.h"
#include "parallel/context_plan.h"
#include "sim/hardware.h"
#include "train/setup/settings.h"

namespace tessera {

// What a step's documents take on ranks of some hardware, with dynamic context parallelism and with
// the degree of parallel.cp for all: times of a rank's passes as StepWork has them, and of
// attention by the pairs of queries and keys that each rank has.

/// Seconds of a rank's token, pair and exchanged token, forward and backward, by the programs of
/// rank 0 as they are compiled for CPUs.
ContextCosts simulate_costs(const Settings& settings, int64_t num_ranks, const Hardware& hardware);

/// How the ranks work on a step's documents.
struct ContextWay {
  int64_t micro_batches = 0;
  double seconds = 0;                   ///< of the passes, until the last rank is done
  double mean_seconds = 0;              ///< of a rank's own work
  std::map<int64_t, int64_t> groups{};  ///< how many micro-batches of each degree
};

struct ContextComparison {
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t longest = 0;
  ContextWay fixed, dynamic;
  double ratio() const { return fixed.seconds / dynamic.seconds; }
};

/// Of a step of that data. The settings have parallel.dynamic_cp.
ContextComparison compare_contexts(const Settings& settings, int64_t num_ranks,
                                   const BatchSource& source, const ContextCosts& costs,
                                   int64_t step);

/// Pairs of a query and a key that it sees of each rank of a ring, for rows of packed sequences
/// that it shares in zigzag.
std::vector<double> pairs_of_ring(std::span<const int32_t> cu_seqlens, const Zigzag& tokens);

}  // namespace tessera
