#include "ops/block_sparse/block_sparse.h"
#include "ops/block_sparse/block_sparse_kernels.h"
#include "ops/block_sparse/expert_products.h"
#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"

namespace tessera {
namespace {

using namespace cuda;
using Product = BlockSparseProduct;

void block_topology(const BlockTopologyOp& op, const Args<BlockTopologyOp>& args) {
  using Op = BlockTopologyOp;
  const BlockTopologySpec& spec = op.spec();
  const auto num_experts = static_cast<int>(spec.expert_sizes.size());
  BuildTopology build{.num_experts = num_experts,
                      .block_size = static_cast<int>(spec.block_size),
                      .max_block_rows = args.out(Op::kRowOffsets).shape[0] - 1,
                      .max_blocks = args.out(Op::kColIndices).shape[0],
                      .offsets = args.in(Op::kOffsets).as<int64_t>(),
                      .row_offsets = args.out(Op::kRowOffsets).as<int32_t>(),
                      .col_indices = args.out(Op::kColIndices).as<int32_t>(),
                      .row_indices = args.out(Op::kRowIndices).as<int32_t>(),
                      .col_offsets = args.out(Op::kColOffsets).as<int32_t>(),
                      .transpose_indices = args.out(Op::kTransposeIndices).as<int32_t>(),
                      .num_blocks = args.out(Op::kNumBlocks).as<int64_t>(),
                      .first_cols = {}};
  for (size_t e = 0; e < spec.expert_sizes.size(); ++e) {
    build.first_cols[e + 1] =
        build.first_cols[e] + static_cast<int32_t>(spec.expert_sizes[e] / spec.block_size);
  }
  launch_build_topology(build, stream_of(args));
}

int64_t topology_workspace(const BlockTopologyOp& op, std::span<const ValueType> /*inputs*/) {
  check_limit(op, std::ssize(op.spec().expert_sizes), kTopologyMaxExperts, "experts");
  return 0;
}

SparseType type_of(const Tensor& tensor) {
  return tensor.dtype == DType::kF32 ? SparseType::kF32 : SparseType::kBf16;
}

DeviceTopology topology_of(const BlockSparseProductSpec& spec, const KernelArgs& args) {
  const auto tensor = [&](Product::Input input) { return args.in(input).as<int32_t>(); };
  return {.block_size = static_cast<int>(spec.block_size),
          .max_block_rows = args.in(Product::kRowOffsets).shape[0] - 1,
          .num_block_cols = args.in(Product::kColOffsets).shape[0] - 1,
          .max_blocks = args.in(Product::kColIndices).shape[0],
          .row_offsets = tensor(Product::kRowOffsets),
          .col_indices = tensor(Product::kColIndices),
          .row_indices = tensor(Product::kRowIndices),
          .col_offsets = tensor(Product::kColOffsets),
          .transpose_indices = tensor(Product::kTransposeIndices)};
}

/// Only the sparse matrix's rows are ragged (check_ragged): the last dim of a left operand that
/// enters transposed.
DenseOperand operand_of(const KernelArgs& args, Product::Input input, bool transposed) {
  const Tensor& tensor = args.in(input);
  const bool ragged = input == Product::kLeft && transposed;
  return {.data = tensor.data,
          .columns = {tensor.shape[1], ragged ? args.in_extent(input) : nullptr},
          .transposed = transposed};
}

/// The experts' matrix with these values and a dense one of H columns, where the kernels on tensor
/// cores take both.
std::optional<ExpertMatrix> expert_matrix(const BlockSparseProduct& op, const KernelArgs& args,
                                          const Tensor& values, const Tensor& dense, int64_t wide) {
  if (op.experts() == nullptr || values.dtype != DType::kBF16 || dense.shape[0] == 0)
    return std::nullopt;
  ExpertMatrix matrix = {.sizes = *op.experts(),
                         .experts = {.wide = wide},
                         .topology = topology_of(op.spec(), args),
                         .values = values.data};
  if (!fits_expert_products(matrix, {args.in(Product::kLeft).data, args.in(Product::kRight).data,
                                     args.out(Product::kOut).data}))
    return std::nullopt;
  matrix.experts = context_of(args).get<ExpertTables>().blocks(*op.experts(), wide);
  return matrix;
}

int* counter_of(const KernelArgs& args) {
  return context_of(args).get<ExpertTables>().counter();
}

/// SDD and SDDᵀ of experts; whether it was one that the kernels on tensor cores take.
bool run_expert_sdd(const BlockSparseProduct& op, const KernelArgs& args) {
  const Tensor& left = args.in(Product::kLeft);
  if (op.spec().transpose_left) return false;
  const auto matrix = expert_matrix(op, args, args.out(Product::kOut), left, left.shape[1]);
  if (!matrix) return false;
  expert_rows({.matrix = *matrix,
               .gives_values = true,
               .dense = left.data,
               .num_rows = left.shape[0],
               .weight = args.in(Product::kRight).data,
               .weight_by_rows = op.spec().transpose_right,
               .counter = counter_of(args)},
              stream_of(args));
  return true;
}

/// The same of DSD and DSDᵀ.
bool run_expert_dsd(const BlockSparseProduct& op, const KernelArgs& args) {
  const BlockSparseProductSpec& spec = op.spec();
  const Tensor& out = args.out(Product::kOut);
  if (spec.kind != ProductKind::kDsd || spec.transpose_left || spec.accumulate) return false;
  const auto matrix = expert_matrix(op, args, args.in(Product::kLeft), out, out.shape[1]);
  if (!matrix) return false;
  // Rows of no expert are zero, unless they are beyond the actual ones.
  if (args.out_extent(Product::kOut) == nullptr)
    check(cudaMemsetAsync(out.data, 0, out.num_bytes(), stream_of(args)));
  expert_rows({.matrix = *matrix,
               .gives_values = false,
               .dense = out.data,
               .num_rows = out.shape[0],
               .weight = args.in(Product::kRight).data,
               .weight_by_rows = !spec.transpose_right,
               .counter = counter_of(args)},
              stream_of(args));
  return true;
}

/// The same of the gradients of weights: DSᵀD and DDᵀS, accumulated.
bool run_expert_wgrad(const BlockSparseProduct& op, const KernelArgs& args) {
  const BlockSparseProductSpec& spec = op.spec();
  const bool by_rows = spec.kind == ProductKind::kDsd;
  const bool is_gradient = spec.accumulate && spec.transpose_left && !spec.transpose_right;
  if (!is_gradient) return false;
  const Tensor& dense = args.in(by_rows ? Product::kRight : Product::kLeft);
  const auto matrix = expert_matrix(op, args, args.in(by_rows ? Product::kLeft : Product::kRight),
                                    dense, dense.shape[1]);
  if (!matrix) return false;
  expert_wgrad({.matrix = *matrix,
                .dense = dense.data,
                .num_rows = dense.shape[0],
                .grad = args.out(Product::kOut).as<float>(),
                .grad_by_rows = by_rows,
                .accumulate = !args.set_accumulators,
                .counter = counter_of(args)},
               stream_of(args));
  return true;
}

void sdd(const BlockSparseProduct& op, const KernelArgs& args) {
  if (run_expert_sdd(op, args)) return;
  const BlockSparseProductSpec& spec = op.spec();
  launch_sparse_output({.topology = topology_of(spec, args),
                        .type = type_of(args.in(Product::kLeft)),
                        .inner = args.in(Product::kLeft).shape[spec.transpose_left ? 0 : 1],
                        .left = operand_of(args, Product::kLeft, spec.transpose_left),
                        .right = operand_of(args, Product::kRight, spec.transpose_right),
                        .values = args.out(Product::kOut).data},
                       stream_of(args));
}

void dense_product(const BlockSparseProduct& op, const KernelArgs& args) {
  const BlockSparseProductSpec& spec = op.spec();
  const Tensor& out = args.out(Product::kOut);
  if (!out || run_expert_dsd(op, args) || run_expert_wgrad(op, args)) return;
  if (args.set_accumulators) check(cudaMemsetAsync(out.data, 0, out.num_bytes(), stream_of(args)));
  const bool sparse_left = op.is_sparse(0);
  const bool sparse_transposed = sparse_left ? spec.transpose_left : spec.transpose_right;
  const bool dense_transposed = sparse_left ? spec.transpose_right : spec.transpose_left;
  const bool by_rows = sparse_left != sparse_transposed;
  const Product::Input dense_input = sparse_left ? Product::kRight : Product::kLeft;
  const Tensor& dense = args.in(dense_input);
  const bool cross_contiguous = sparse_left == dense_transposed;
  const bool dense_ragged = !by_rows && cross_contiguous;
  const bool out_ragged = by_rows && !sparse_left;
  launch_dense_output(
      {.topology = topology_of(spec, args),
       .type = type_of(dense),
       .by_rows = by_rows,
       .outer = out.shape[sparse_left ? 1 : 0],
       .values = args.in(sparse_left ? Product::kLeft : Product::kRight).data,
       .dense = dense.data,
       .dense_columns = {dense.shape[1], dense_ragged ? args.in_extent(dense_input) : nullptr},
       .cross_contiguous = cross_contiguous,
       .out = spec.accumulate ? nullptr : out.data,
       .sum = spec.accumulate ? out.as<float>() : nullptr,
       .outer_contiguous = sparse_left,
       .out_columns = {out.shape[1], out_ragged ? args.out_extent(Product::kOut) : nullptr},
       .rows = by_rows ? args.out_extent(Product::kOut) : nullptr},
      stream_of(args));
}

/// No memory is needed; this is where a product is seen with its types. A dense operand may be
/// ragged in the sparse matrix's rows alone, since its kernel cannot tell which dim an extent is
/// of.
int64_t check_ragged(const BlockSparseProduct& op, std::span<const ValueType> inputs) {
  const BlockSparseProductSpec& spec = op.spec();
  for (int operand = 0; operand < 2; ++operand) {
    const ValueType& type = inputs[operand];
    if (op.is_sparse(operand) || !type.ragged()) continue;
    const bool transposed = operand == 0 ? spec.transpose_left : spec.transpose_right;
    // The dim, as the operand enters, that is the sparse matrix's rows; -1: neither is.
    int rows = -1;
    if (spec.kind == ProductKind::kSdd) {
      rows = operand == 0 ? 0 : -1;
    } else if (!op.needs_rows()) {
      rows = operand == 1 ? 0 : 1;
    }
    const int dim = transposed ? 1 - type.ragged_dim : type.ragged_dim;
    check_shape(op, dim == rows,
                "on a GPU only the dim of the sparse matrix's rows may be ragged, operand {} is {}",
                operand, type.to_string());
  }
  return 0;
}

/// What both passes are given. `Op` names their operands alike.
template <typename Op>
SparseActivation activation_of(const Op& op, const Args<Op>& args) {
  const BlockSparseActivationSpec& spec = op.spec();
  const Tensor& probs_R = args.in(Op::kProbs);
  return {.activation = spec.activation,
          .type = type_of(args.in(Op::kPre)),
          .block_size = static_cast<int>(spec.block_size),
          .num_rows = probs_R.shape[0] / spec.block_size * spec.block_size,
          .extent = args.in_extent(Op::kProbs),
          .row_offsets = args.in(Op::kRowOffsets).template as<int32_t>(),
          .pre = args.in(Op::kPre).data,
          .probs_R = probs_R.as<float>(),
          .grad = nullptr,
          .out = nullptr,
          .grad_pre = nullptr,
          .grad_probs_R = nullptr};
}

void sparse_activation(const BlockSparseActivation& op, const Args<BlockSparseActivation>& args) {
  SparseActivation call = activation_of(op, args);
  call.out = args.out(BlockSparseActivation::kOut).data;
  launch_sparse_activation(call, stream_of(args));
}

void sparse_activation_backward(const BlockSparseActivationBackward& op,
                                const Args<BlockSparseActivationBackward>& args) {
  using Op = BlockSparseActivationBackward;
  SparseActivation call = activation_of(op, args);
  call.grad = args.in(Op::kGrad).data;
  call.grad_pre = args.out(Op::kGradPre).data;
  call.grad_probs_R = args.out(Op::kGradProbs).as<float>();
  launch_sparse_activation_backward(call, stream_of(args));
}

}  // namespace

void add_block_sparse_cuda(KernelTable& table) {
  add_kernel<BlockTopologyOp>(table, block_topology, {.workspace = topology_workspace});
  add_kernel<BlockSparseProduct>(table, "sdd", sdd, {.workspace = check_ragged});
  for (const std::string_view name : {"dsd", "dds"})
    add_kernel<BlockSparseProduct>(table, name, dense_product,
                                   {.workspace = check_ragged, .sets_accumulators = true});
  add_kernel<BlockSparseActivation>(table, sparse_activation);
  add_kernel<BlockSparseActivationBackward>(table, sparse_activation_backward);
}

}  // namespace tessera
