#pragma once

#include <string>
#include <vector>

namespace tessera {

/// A part of a machine's memory with the cores that are near it.
struct NumaNode {
  int number = 0;                       ///< the system's
  std::vector<std::vector<int>> cores;  ///< the processors of each, by the system's numbers

  std::vector<int> processors() const;
};

/// The nodes that have processors, with those that this process may use, in the order in which they
/// lie on the machine (hwloc).
std::vector<NumaNode> find_numa_nodes();
/// Of a machine in hwloc's synthetic form, such as "numa:2 core:4 pu:2". Throws UserError for other
/// text.
std::vector<NumaNode> parse_numa_nodes(const std::string& machine);

/// The number of the NUMA node to which a device is connected, by its address on the PCI bus, such
/// as "0000:3b:00.0"; -1 where that is not known.
int numa_node_of(const std::string& pci_address);

/// The processors that this thread may run on.
std::vector<int> bound_processors();
/// All threads of this process, and those that it will start, run on these processors alone.
/// Returns whether the system allows that.
bool bind_process(const std::vector<int>& processors);

/// "0-3,8".
std::string format_ranges(const std::vector<int>& numbers);

}  // namespace tessera
