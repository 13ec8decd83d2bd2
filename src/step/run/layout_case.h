#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "model/run/model_testing.h"
#include "parallel/options.h"

namespace tessera::testing {

/// A model on a layout.
struct LayoutCase {
  std::string name;
  int64_t num_ranks = 1;
  void (*spread)(ParallelSpec&) = [](ParallelSpec&) {};
  void (*change)(ModelConfig&) = [](ModelConfig&) {};
  bool recompute = false;
  GatherFusion gathers = GatherFusion::kAuto;
  bool fuse_activations = false;
  std::vector<std::string> offload = {};
  /// Rows that the device alone counts wait in pages, of which there are enough for the worst.
  bool stash = false;
  bool documents = false;  ///< rows have two each, of different lengths
};
inline void PrintTo(const LayoutCase& c, std::ostream* out) {
  *out << c.name;
}

}  // namespace tessera::testing
