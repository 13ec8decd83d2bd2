#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "sim/hardware.h"
#include "train/setup/settings.h"

namespace tessera {

/// The keys that a search may set. Those that a configuration sets itself stay as they are.
std::vector<std::string> searched_keys();

/// What a search may change, and over which ranks.
struct SearchSpace {
  Settings base;
  int64_t num_ranks = 1;
  int64_t node_devices = 1;
  std::set<std::string> fixed;  ///< searched keys that stay as they are in `base`

  bool may_set(const std::string& key) const { return !fixed.contains(key); }
};

/// Layouts of the ranks, each with as few sequences at a time and chunks a stage as the base
/// allows: tensor parallelism within a node, contexts shared where sequences are long, stages that
/// are powers of two or divide the layers, experts over any number of ranks that divides them, and
/// weights sharded in full or by the optimizer's state alone. In a fixed order; what the program
/// refuses may be among them.
std::vector<Settings> list_layouts(const SearchSpace& space);

/// The same layout with other micro-batches and chunks a stage, itself left out.
std::vector<Settings> list_variants(const SearchSpace& space, const Settings& layout);

/// The same with merged passes; nothing where no pass could hide an exchange of another, or none
/// may be merged.
std::optional<Settings> merge_passes(const SearchSpace& space, const Settings& settings);

/// The same with each other way of bringing tokens to experts on several ranks that may be chosen:
/// once to each rank and, where EP spans nodes with several of its ranks each, once to each node.
std::vector<Settings> other_dispatchers(const SearchSpace& space, const Settings& settings);

/// "tp 2, pp 8 x 2 chunks, ep 64, micro-batch 1, full sharding": what is not as by default.
std::string describe_candidate(const Settings& settings);
/// The searched keys as overrides: "--parallel.tp=2".
std::vector<std::string> list_overrides(const Settings& settings);

}  // namespace tessera
