#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/expert_sizes.h"
#include "ops/operator.h"

namespace tessera {

/// Products with one block-sparse matrix, named output-left-right, S sparse and D dense
/// (MegaBlocks, section 4).
enum class ProductKind {
  kSdd,  ///< sparse = dense · dense, at the topology's blocks only
  kDsd,  ///< dense = sparse · dense
  kDds,  ///< dense = dense · sparse
};

struct BlockSparseProductSpec {
  ProductKind kind = ProductKind::kSdd;
  int64_t block_size = 128;
  /// Whether an operand enters transposed: SDDᵀ, DSᵀD, DSDᵀ, DDᵀS, DDSᵀ. A sparse one is walked by
  /// transpose indices, never copied.
  bool transpose_left = false;
  bool transpose_right = false;
  /// The dense output is an FP32 accumulator that the product is added to.
  bool accumulate = false;
  /// The dense operand that is a weight (0 left, 1 right), whose gradient is accumulated; -1:
  /// neither is.
  int weight = -1;
  /// Not empty: a promise that the topology is "block_topology"'s of experts with this many columns
  /// each, with which a GPU multiplies whole experts instead of blocks. The result is the same but
  /// for rounding.
  std::vector<int64_t> expert_sizes = {};
};

/// A block-sparse product, with gradients built from the other products. Inputs, in order:
///
/// - left, right: the operands, both F32 or both BF16; a sparse one is [nnz, B, B], see
/// TopologyView;
/// - row_offsets, col_indices, row_indices, col_offsets, transpose_indices of the sparse matrix, as
///   "block_topology" puts them out;
/// - rows, only where needs_rows(): any value that has the output's row count, ragged or not, in
///   the dim that it has in the output (or in its last dim); never read.
///
/// Output: [nnz, B, B] for SDD; else dense in the operands' type, or F32 where it accumulates.
/// Dense outputs of empty block-rows or -columns are zero.
///
/// Deterministic; BF16 is accumulated in FP32 over the whole sum, however many blocks it runs over.
class BlockSparseProduct final : public Operator {
 public:
  enum Input : int {
    kLeft,
    kRight,
    kRowOffsets,
    kColIndices,
    kRowIndices,
    kColOffsets,
    kTransposeIndices,
    kRows  ///< last, where needs_rows()
  };
  enum Output : int { kOut };

  /// Throws UserError where the block size is not supported, or an expert's size does not fit it.
  explicit BlockSparseProduct(const BlockSparseProductSpec& spec);

  const BlockSparseProductSpec& spec() const { return spec_; }
  /// Null where the topology is any.
  const ExpertSizes* experts() const { return experts_ ? &*experts_ : nullptr; }
  /// Whether the output has the sparse matrix's rows as a dim: DSD, and DDSᵀ.
  bool needs_rows() const;
  /// Whether operand 0 (left) or 1 (right) is the sparse one.
  bool is_sparse(int operand) const {
    return spec_.kind == (operand == 0 ? ProductKind::kDsd : ProductKind::kDds);
  }

  /// "sdd", "dsd" or "dds".
  std::string_view name() const override;
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  bool accumulates(int output) const override { return output == 0 && spec_.accumulate; }

 private:
  struct Gradient;
  void emit_gradient(GradientBuilder& builder, int operand, const Gradient& gradient) const;

  BlockSparseProductSpec spec_;
  std::optional<ExpertSizes> experts_;
};

OperatorPtr make_block_sparse_product(const BlockSparseProductSpec& spec);

/// FP32 scratch that one thread needs for a tile of a BF16 output which several rectangles add up
/// to.
int64_t product_scratch_bytes(int64_t block_size);

void add_block_sparse_product_cpu(KernelTable& table);

}  // namespace tessera
