#include "core/process/processors.h"

#include <hwloc.h>

#include <algorithm>
#include <memory>

#include "core/error.h"

namespace tessera {
namespace {

using TopologyPtr =
    std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, decltype(&hwloc_topology_destroy)>;
using BitmapPtr =
    std::unique_ptr<std::remove_pointer_t<hwloc_bitmap_t>, decltype(&hwloc_bitmap_free)>;

enum class Devices { kNone, kPci };

/// This machine, or what the text describes; null where that cannot be found out.
TopologyPtr load(const std::string* synthetic, Devices devices) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return {nullptr, &hwloc_topology_destroy};
  TopologyPtr topology(raw, &hwloc_topology_destroy);
  if (synthetic != nullptr && hwloc_topology_set_synthetic(raw, synthetic->c_str()) != 0)
    return {nullptr, &hwloc_topology_destroy};
  if (devices == Devices::kPci)
    hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (hwloc_topology_load(raw) != 0) return {nullptr, &hwloc_topology_destroy};
  return topology;
}

BitmapPtr make_bitmap() {
  return {hwloc_bitmap_alloc(), &hwloc_bitmap_free};
}

std::vector<int> list(hwloc_const_bitmap_t set) {
  std::vector<int> numbers;
  for (int i = hwloc_bitmap_first(set); i >= 0; i = hwloc_bitmap_next(set, i)) numbers.push_back(i);
  return numbers;
}

/// A core of a machine that does not tell its cores is a processor.
std::vector<std::vector<int>> cores_of(hwloc_topology_t topology, hwloc_obj_t node) {
  const bool has_cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE) > 0;
  const hwloc_obj_type_t type = has_cores ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  std::vector<std::vector<int>> cores;
  hwloc_obj_t core = nullptr;
  while ((core = hwloc_get_next_obj_inside_cpuset_by_type(topology, node->cpuset, type, core)) !=
         nullptr)
    cores.push_back(list(core->cpuset));
  return cores;
}

std::vector<NumaNode> list_nodes(hwloc_topology_t topology) {
  std::vector<NumaNode> nodes;
  hwloc_obj_t node = nullptr;
  while ((node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr) {
    if (node->cpuset == nullptr || hwloc_bitmap_iszero(node->cpuset)) continue;
    nodes.push_back({static_cast<int>(node->os_index), cores_of(topology, node)});
  }
  return nodes;
}

}  // namespace

std::vector<int> NumaNode::processors() const {
  std::vector<int> all;
  for (const std::vector<int>& core : cores) all.insert(all.end(), core.begin(), core.end());
  std::ranges::sort(all);
  return all;
}

std::vector<NumaNode> find_numa_nodes() {
  const TopologyPtr topology = load(nullptr, Devices::kNone);
  return topology ? list_nodes(topology.get()) : std::vector<NumaNode>();
}

std::vector<NumaNode> parse_numa_nodes(const std::string& machine) {
  const TopologyPtr topology = load(&machine, Devices::kNone);
  require(topology != nullptr, "\"{}\" describes no machine; \"numa:2 core:4 pu:2\" does", machine);
  return list_nodes(topology.get());
}

int numa_node_of(const std::string& pci_address) {
  const TopologyPtr topology = load(nullptr, Devices::kPci);
  if (!topology) return -1;
  hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology.get(), pci_address.c_str());
  if (device == nullptr) return -1;
  const hwloc_obj_t near = hwloc_get_non_io_ancestor_obj(topology.get(), device);
  if (near == nullptr || near->nodeset == nullptr || hwloc_bitmap_weight(near->nodeset) != 1)
    return -1;
  return hwloc_bitmap_first(near->nodeset);
}

std::vector<int> bound_processors() {
  const TopologyPtr topology = load(nullptr, Devices::kNone);
  const BitmapPtr set = make_bitmap();
  if (!topology || hwloc_get_cpubind(topology.get(), set.get(), HWLOC_CPUBIND_THREAD) != 0)
    return {};
  return list(set.get());
}

bool bind_process(const std::vector<int>& processors) {
  const TopologyPtr topology = load(nullptr, Devices::kNone);
  const BitmapPtr set = make_bitmap();
  for (const int processor : processors) hwloc_bitmap_set(set.get(), processor);
  return topology && hwloc_set_cpubind(topology.get(), set.get(), HWLOC_CPUBIND_PROCESS) == 0;
}

std::string format_ranges(const std::vector<int>& numbers) {
  std::string text;
  for (size_t first = 0; first < numbers.size();) {
    size_t last = first;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", numbers[first]);
    if (last > first) text += fmt::format("-{}", numbers[last]);
    first = last + 1;
  }
  return text;
}

}  // namespace tessera
