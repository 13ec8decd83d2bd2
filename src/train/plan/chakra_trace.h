#pragma once

#include <string>
#include <vector>

#include "train/plan/simulated_step.h"

namespace tessera {

/// A step as execution traces of MLCommons Chakra (et_def.proto, schema 0.0.4), which simulators of
/// networks such as ASTRA-sim run: for each rank a file of messages, each behind its length, first
/// the GlobalMetadata, then the Nodes.
///
/// Nodes are computation between exchanges (COMP_NODE), exchanges (COMM_COLL_NODE), messages
/// (COMM_SEND_NODE, COMM_RECV_NODE) and copies from and to the host's memory (MEM_LOAD_NODE,
/// MEM_STORE_NODE), with their simulated times. A node depends on what its lane did before, and on
/// the exchanges that its rank waited for. `comm_size` is what a rank brings to an exchange.
struct ChakraTraces {
  std::vector<std::string> ranks;  ///< the contents of each rank's file
  /// {"0": [0, 1], ...}: the ranks of the groups that nodes name by pg_name.
  std::string groups;
};
ChakraTraces make_chakra_traces(const SimulatedPlans& plans);

}  // namespace tessera
