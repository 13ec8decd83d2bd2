#include "ops/block_sparse/block_topology.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "ops/block_sparse/topology.h"

namespace tessera {
namespace {

constexpr int kExtentOutput = 5;

/// Most blocks that a routing can give: all rows at the widest expert.
int64_t max_blocks(const BlockTopologySpec& spec) {
  const int64_t widest = spec.expert_sizes.empty() ? 0 : std::ranges::max(spec.expert_sizes);
  return (spec.max_rows / spec.block_size) * (widest / spec.block_size);
}

}  // namespace

BlockTopologyOp::BlockTopologyOp(BlockTopologySpec spec) : spec_(std::move(spec)) {
  require_block_size(spec_.block_size);
  require_expert_sizes(spec_.expert_sizes, spec_.block_size);
  require(spec_.max_rows >= 0, "the bound of routed rows must not be negative, got {}",
          spec_.max_rows);
  require(max_blocks(spec_) <= INT32_MAX,
          "{} blocks of size {} exceed 32-bit indices; use a larger block size", max_blocks(spec_),
          spec_.block_size);
}

std::string BlockTopologyOp::attributes() const {
  return fmt::format("block={} experts={}", spec_.block_size, spec_.expert_sizes.size());
}

std::vector<ValueType> BlockTopologyOp::infer(std::span<const ValueType> inputs) const {
  const auto num_offsets = static_cast<int64_t>(spec_.expert_sizes.size()) + 1;
  check_shape(*this,
              inputs.size() == 1 && inputs[kOffsets] == ValueType{DType::kI64, {num_offsets}},
              "one input expected: offsets i64 [{}]", num_offsets);
  const int64_t num_cols =
      std::accumulate(spec_.expert_sizes.begin(), spec_.expert_sizes.end(), int64_t{0});
  const ValueType row_offsets{DType::kI32, {spec_.max_rows / spec_.block_size + 1}};
  const ValueType col_offsets{DType::kI32, {num_cols / spec_.block_size + 1}};
  const ValueType indices{DType::kI32, {max_blocks(spec_)}, 0, Extent::own_output(kExtentOutput)};
  return {row_offsets, indices, indices, col_offsets, indices, {DType::kI64, {1}}};
}

OperatorPtr make_block_topology(BlockTopologySpec spec) {
  return std::make_shared<BlockTopologyOp>(std::move(spec));
}

}  // namespace tessera
