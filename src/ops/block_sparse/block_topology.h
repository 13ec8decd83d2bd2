#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/operator.h"

namespace tessera {

struct BlockTopologySpec {
  int64_t block_size = 128;
  /// Columns of each expert: its inner size F_e, or 2·F_e for the gate and up halves of a gated
  /// first layer. They may differ; each must be a multiple of the block size.
  std::vector<int64_t> expert_sizes;
  /// Bound of the routed rows, padding included.
  int64_t max_rows = 0;
};

/// The block-diagonal topology of a layer's experts, built from each routing (MegaBlocks,
/// section 5.1).
///
/// Input: offsets I64 [E + 1], where each expert's rows start, multiples of the block size.
/// Outputs, I32, see TopologyView, and their extent nnz:
///
///     row_offsets        [max_rows / B + 1]
///     col_indices        [nnz ragged]
///     row_indices        [nnz ragged]
///     col_offsets        [Σ expert_sizes / B + 1]
///     transpose_indices  [nnz ragged]
///     nnz                I64 [1]
///
/// Depends on a routing decision: never recomputed, no gradient.
class BlockTopologyOp final : public Operator {
 public:
  static constexpr std::string_view kName = "block_topology";
  enum Input : int { kOffsets };
  enum Output : int {
    kRowOffsets,
    kColIndices,
    kRowIndices,
    kColOffsets,
    kTransposeIndices,
    kNumBlocks
  };

  /// Throws UserError where a size does not fit the block size, naming the nearest that does.
  explicit BlockTopologyOp(BlockTopologySpec spec);

  const BlockTopologySpec& spec() const { return spec_; }
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }

 private:
  BlockTopologySpec spec_;
};

OperatorPtr make_block_topology(BlockTopologySpec spec);

void add_block_topology_cpu(KernelTable& table);

}  // namespace tessera
