#include "ops/block_sparse/block_topology.h"
#include "ops/block_sparse/topology.h"

namespace tessera {
namespace {

void block_topology_kernel(const Operator& op, const KernelArgs& args) {
  const auto& spec = static_cast<const BlockTopologyOp&>(op).spec();
  const TopologyArrays arrays{args.out(0).span<int32_t>(), args.out(1).span<int32_t>(),
                              args.out(2).span<int32_t>(), args.out(3).span<int32_t>(),
                              args.out(4).span<int32_t>()};
  *args.out(5).as<int64_t>() =
      build_expert_topology(args.in(0).span<int64_t>(), spec.expert_sizes, spec.block_size, arrays);
}

}  // namespace

void add_block_topology_cpu(KernelTable& table) {
  table["block_topology"] = block_topology_kernel;
}

}  // namespace tessera
