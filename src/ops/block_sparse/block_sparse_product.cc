#include "ops/block_sparse/block_sparse_product.h"

#include <algorithm>
#include <array>
#include <memory>

#include "ops/block_sparse/topology.h"

namespace tessera {
namespace {

/// One dim of a value: its bound, and the value that holds its extent where it is ragged.
struct Dim {
  int64_t bound = 0;
  Extent extent;
  bool ragged = false;

  bool operator==(const Dim&) const = default;
};

Dim dim_of(const ValueType& type, int dim) {
  const bool ragged = type.ragged_dim == dim;
  return {type.shape[dim], ragged ? type.extent : Extent(), ragged};
}

/// The rows and columns of a dense operand as it enters the product.
std::array<Dim, 2> matrix_dims(const ValueType& type, bool transposed) {
  return {dim_of(type, transposed ? 1 : 0), dim_of(type, transposed ? 0 : 1)};
}

std::array<Dim, 2> swap_if(bool transposed, const Dim& a, const Dim& b) {
  if (transposed) return {b, a};
  return {a, b};
}

ValueType matrix_type(DType dtype, const Dim& rows, const Dim& cols) {
  ValueType type{dtype, {rows.bound, cols.bound}};
  if (rows.ragged) {
    type.ragged_dim = 0;
    type.extent = rows.extent;
  } else if (cols.ragged) {
    type.ragged_dim = 1;
    type.extent = cols.extent;
  }
  return type;
}

using Product = BlockSparseProduct;

/// Block-rows, block-columns and blocks of the topology among a product's inputs, at their bounds.
struct TopologyBound {
  int64_t num_block_rows = 0;
  int64_t num_block_cols = 0;
  int64_t num_blocks = 0;
};

TopologyBound topology_bound(std::span<const ValueType> inputs) {
  return {inputs[Product::kRowOffsets].shape[0] - 1, inputs[Product::kColOffsets].shape[0] - 1,
          inputs[Product::kColIndices].shape[0]};
}

/// Elements of the blocks at their bound; of experts with as many rows each, where they are known,
/// since the bound has all rows at the widest.
double num_sparse_elements(const TopologyBound& bound, int64_t block_size,
                           const ExpertSizes* experts) {
  const auto block = static_cast<double>(block_size);
  if (experts == nullptr) return static_cast<double>(bound.num_blocks) * block * block;
  return static_cast<double>(bound.num_block_rows) * block * static_cast<double>(experts->total()) /
         static_cast<double>(experts->num_experts());
}

void check_topology(const Operator& op, std::span<const ValueType> inputs) {
  for (int i = Product::kRowOffsets; i <= Product::kTransposeIndices; ++i) {
    const ValueType& type = inputs[i];
    check_shape(op, type.dtype == DType::kI32 && type.shape.rank() == 1,
                "topology tensor {} must be I32 of rank 1, got {}", i - Product::kRowOffsets,
                type.to_string());
  }
  const TopologyBound bound = topology_bound(inputs);
  check_shape(op, bound.num_block_rows >= 0 && bound.num_block_cols >= 0,
              "topology offsets must not be empty");
  for (const int i : {Product::kRowIndices, Product::kTransposeIndices}) {
    const int64_t length = inputs[i].shape[0];
    check_shape(op, length == bound.num_blocks, "topology tensor {} has {} entries for {} blocks",
                i - Product::kRowOffsets, length, bound.num_blocks);
  }
}

void check_sparse(const Operator& op, const ValueType& type, int64_t block_size,
                  int64_t num_blocks) {
  check_shape(op, type.shape == Shape({num_blocks, block_size, block_size}),
              "sparse values must be [nnz, B, B] = [{}, {}, {}], got {}", num_blocks, block_size,
              block_size, type.to_string());
}

/// The dim must be the sparse matrix's rows: all of its block-rows and at most a part of one more.
void check_sparse_rows(const Operator& op, const Dim& dim, int64_t block_size,
                       int64_t num_block_rows) {
  check_shape(op, dim.bound / block_size == num_block_rows,
              "{} rows for a topology of at most {} block-rows of {}", dim.bound, num_block_rows,
              block_size);
}

void check_sparse_cols(const Operator& op, const Dim& dim, int64_t block_size,
                       int64_t num_block_cols) {
  check_shape(op, !dim.ragged && dim.bound == num_block_cols * block_size,
              "{} columns for a topology of {}", dim.bound, num_block_cols * block_size);
}

ValueType infer_sdd(const BlockSparseProduct& op, std::span<const ValueType> inputs) {
  const BlockSparseProductSpec& spec = op.spec();
  const TopologyBound bound = topology_bound(inputs);
  const auto [rows, inner] = matrix_dims(inputs[Product::kLeft], spec.transpose_left);
  const auto [right_inner, cols] = matrix_dims(inputs[Product::kRight], spec.transpose_right);
  check_shape(op, inner == right_inner, "inner dims differ: left {}, right {}",
              inputs[Product::kLeft].to_string(), inputs[Product::kRight].to_string());
  check_sparse_rows(op, rows, spec.block_size, bound.num_block_rows);
  check_sparse_cols(op, cols, spec.block_size, bound.num_block_cols);
  ValueType type = inputs[Product::kColIndices];
  type.dtype = inputs[Product::kLeft].dtype;
  type.shape = {bound.num_blocks, spec.block_size, spec.block_size};
  return type;
}

/// The output's row count where it is the sparse matrix's, from the `rows` input.
Dim rows_dim(const BlockSparseProduct& op, std::span<const ValueType> inputs, int output_dim) {
  const ValueType& rows = inputs[Product::kRows];
  check_shape(op, rows.shape.rank() >= 1, "the rows input needs a dim");
  return dim_of(rows, std::min(output_dim, rows.shape.rank() - 1));
}

ValueType infer_dense(const BlockSparseProduct& op, std::span<const ValueType> inputs) {
  const BlockSparseProductSpec& spec = op.spec();
  const TopologyBound bound = topology_bound(inputs);
  const bool sparse_left = op.is_sparse(0);
  const ValueType& dense = inputs[sparse_left ? Product::kRight : Product::kLeft];
  check_sparse(op, inputs[sparse_left ? Product::kLeft : Product::kRight], spec.block_size,
               bound.num_blocks);
  const auto [dense_rows, dense_cols] =
      matrix_dims(dense, sparse_left ? spec.transpose_right : spec.transpose_left);
  const Dim inner = sparse_left ? dense_rows : dense_cols;
  const Dim outer = sparse_left ? dense_cols : dense_rows;
  Dim across;
  if (op.needs_rows()) {
    check_sparse_cols(op, inner, spec.block_size, bound.num_block_cols);
    across = rows_dim(op, inputs, sparse_left ? 0 : 1);
    check_sparse_rows(op, across, spec.block_size, bound.num_block_rows);
  } else {
    check_sparse_rows(op, inner, spec.block_size, bound.num_block_rows);
    across = {bound.num_block_cols * spec.block_size, -1, false};
  }
  check_shape(op, !(across.ragged && outer.ragged), "both dims of the output would be ragged");
  const auto [rows, cols] = swap_if(!sparse_left, across, outer);
  return matrix_type(spec.accumulate ? DType::kF32 : dense.dtype, rows, cols);
}

}  // namespace

BlockSparseProduct::BlockSparseProduct(const BlockSparseProductSpec& spec) : spec_(spec) {
  require_block_size(spec.block_size);
  ensure(!(spec.accumulate && spec.kind == ProductKind::kSdd), "a sparse output cannot accumulate");
  require_expert_sizes(spec.expert_sizes, spec.block_size);
  if (!spec.expert_sizes.empty()) experts_.emplace(spec.expert_sizes, "block-sparse product");
}

bool BlockSparseProduct::needs_rows() const {
  return (spec_.kind == ProductKind::kDsd && !spec_.transpose_left) ||
         (spec_.kind == ProductKind::kDds && spec_.transpose_right);
}

std::string_view BlockSparseProduct::name() const {
  switch (spec_.kind) {
    case ProductKind::kSdd:
      return "sdd";
    case ProductKind::kDsd:
      return "dsd";
    case ProductKind::kDds:
      return "dds";
  }
  return "";
}

std::string BlockSparseProduct::attributes() const {
  return fmt::format("block={}{}{}{}{}", spec_.block_size, spec_.transpose_left ? " left^T" : "",
                     spec_.transpose_right ? " right^T" : "", spec_.accumulate ? " accumulate" : "",
                     experts_ ? " experts=" + experts_->to_string() : "");
}

std::vector<ValueType> BlockSparseProduct::infer(std::span<const ValueType> inputs) const {
  const size_t expected = Product::kRows + (needs_rows() ? 1 : 0);
  check_shape(*this, inputs.size() == expected, "{} inputs expected, got {}", expected,
              inputs.size());
  check_topology(*this, inputs);
  if (experts_) {
    const int64_t num_cols = topology_bound(inputs).num_block_cols * spec_.block_size;
    check_shape(*this, experts_->total() == num_cols, "experts of {} columns for a topology of {}",
                experts_->total(), num_cols);
  }
  const DType dtype = inputs[Product::kLeft].dtype;
  check_shape(*this, dtype == inputs[Product::kRight].dtype && is_storage(dtype),
              "operands must both be F32 or both BF16, got {} and {}",
              inputs[Product::kLeft].to_string(), inputs[Product::kRight].to_string());
  const bool sdd = spec_.kind == ProductKind::kSdd;
  for (int operand = 0; operand < 2; ++operand) {
    const int rank = is_sparse(operand) ? 3 : 2;
    const ValueType& type = inputs[operand];
    check_shape(*this, type.shape.rank() == rank, "operand {} must have rank {}, got {}", operand,
                rank, type.to_string());
  }
  return {sdd ? infer_sdd(*this, inputs) : infer_dense(*this, inputs)};
}

Cost BlockSparseProduct::cost(std::span<const ValueType> inputs,
                              std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  if (needs_rows()) cost.bytes -= static_cast<double>(inputs[Product::kRows].num_bytes());
  // The dim of the dense operand that is not one of the sparse matrix's.
  const auto [left_rows, left_cols] = matrix_dims(inputs[Product::kLeft], spec_.transpose_left);
  const auto [right_rows, right_cols] = matrix_dims(inputs[Product::kRight], spec_.transpose_right);
  const Dim& free = spec_.kind == ProductKind::kSdd   ? left_cols
                    : spec_.kind == ProductKind::kDsd ? right_cols
                                                      : left_rows;
  cost.flops = 2.0 * num_sparse_elements(topology_bound(inputs), spec_.block_size, experts()) *
               static_cast<double>(free.bound);
  return cost;
}

/// The product that gives one operand's gradient.
struct BlockSparseProduct::Gradient {
  ValueId left = -1;
  bool transpose_left = false;
  bool left_sparse = false;
  ValueId right = -1;
  bool transpose_right = false;
};

void BlockSparseProduct::emit_gradient(GradientBuilder& builder, int operand,
                                       const Gradient& gradient) const {
  const bool accumulate = spec_.weight == operand;
  const auto dense_kind = gradient.left_sparse ? ProductKind::kDsd : ProductKind::kDds;
  const auto product = std::make_shared<BlockSparseProduct>(
      BlockSparseProductSpec{.kind = is_sparse(operand) ? ProductKind::kSdd : dense_kind,
                             .block_size = spec_.block_size,
                             .transpose_left = gradient.transpose_left,
                             .transpose_right = gradient.transpose_right,
                             .accumulate = accumulate,
                             .expert_sizes = spec_.expert_sizes});
  std::vector<ValueId> inputs = {gradient.left, gradient.right};
  for (int i = kRowOffsets; i <= kTransposeIndices; ++i) inputs.push_back(builder.input(i));
  if (product->needs_rows()) inputs.push_back(builder.input(operand));
  if (accumulate) {
    builder.emit(product, inputs, {operand});
  } else {
    builder.set_grad_input(operand, builder.emit(product, inputs)[0]);
  }
}

// With left' and right' the operands as they enter, C = left' right', hence dleft' = dC right'ᵀ and
// dright' = left'ᵀ dC. An operand that enters transposed gets the transpose of that, written as one
// product.
void BlockSparseProduct::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(0);
  if (!grad) return;
  const bool tl = spec_.transpose_left;
  const bool tr = spec_.transpose_right;
  const bool grad_sparse = spec_.kind == ProductKind::kSdd;
  if (builder.needs_grad(0)) {
    const ValueId right = builder.input(1);
    emit_gradient(builder, 0,
                  tl ? Gradient{right, tr, is_sparse(1), *grad, true}
                     : Gradient{*grad, false, grad_sparse, right, !tr});
  }
  if (builder.needs_grad(1)) {
    const ValueId left = builder.input(0);
    emit_gradient(builder, 1,
                  tr ? Gradient{*grad, true, grad_sparse, left, tl}
                     : Gradient{left, !tl, is_sparse(0), *grad, false});
  }
}

OperatorPtr make_block_sparse_product(const BlockSparseProductSpec& spec) {
  return std::make_shared<BlockSparseProduct>(spec);
}

}  // namespace tessera
