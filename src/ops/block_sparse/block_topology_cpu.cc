#include "ops/block_sparse/block_topology.h"
#include "ops/block_sparse/topology.h"

namespace tessera {
namespace {

void block_topology_kernel(const BlockTopologyOp& op, const Args<BlockTopologyOp>& args) {
  using Op = BlockTopologyOp;
  const auto out = [&](Op::Output output) { return args.out(output).span<int32_t>(); };
  const TopologyArrays arrays{out(Op::kRowOffsets), out(Op::kColIndices), out(Op::kRowIndices),
                              out(Op::kColOffsets), out(Op::kTransposeIndices)};
  *args.out(Op::kNumBlocks).as<int64_t>() = build_expert_topology(
      args.in(Op::kOffsets).span<int64_t>(), op.spec().expert_sizes, op.spec().block_size, arrays);
}

}  // namespace

void add_block_topology_cpu(KernelTable& table) {
  add_kernel<BlockTopologyOp>(table, block_topology_kernel);
}

}  // namespace tessera
