#include "ops/block_sparse/block_sparse.h"
#include "ops/block_sparse/block_sparse_kernels.h"
#include "ops/block_sparse/expert_products.h"
#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"

namespace tessera {
namespace {

using namespace cuda;

void block_topology(const Operator& op, const KernelArgs& args) {
  const auto& spec = static_cast<const BlockTopologyOp&>(op).spec();
  const auto num_experts = static_cast<int>(spec.expert_sizes.size());
  BuildTopology build{.num_experts = num_experts,
                      .block_size = static_cast<int>(spec.block_size),
                      .max_block_rows = args.out(0).shape[0] - 1,
                      .max_blocks = args.out(1).shape[0],
                      .offsets = args.in(0).as<int64_t>(),
                      .row_offsets = args.out(0).as<int32_t>(),
                      .col_indices = args.out(1).as<int32_t>(),
                      .row_indices = args.out(2).as<int32_t>(),
                      .col_offsets = args.out(3).as<int32_t>(),
                      .transpose_indices = args.out(4).as<int32_t>(),
                      .num_blocks = args.out(5).as<int64_t>(),
                      .first_cols = {}};
  for (size_t e = 0; e < spec.expert_sizes.size(); ++e) {
    build.first_cols[e + 1] =
        build.first_cols[e] + static_cast<int32_t>(spec.expert_sizes[e] / spec.block_size);
  }
  launch_build_topology(build, stream_of(args));
  check(cudaGetLastError());
}

int64_t topology_workspace(const Operator& op, std::span<const ValueType> /*inputs*/) {
  const auto& spec = static_cast<const BlockTopologyOp&>(op).spec();
  check_limit(op, std::ssize(spec.expert_sizes), kTopologyMaxExperts, "experts");
  return 0;
}

SparseType type_of(const Tensor& tensor) {
  return tensor.dtype == DType::kF32 ? SparseType::kF32 : SparseType::kBf16;
}

DeviceTopology topology_of(const BlockSparseProductSpec& spec, const KernelArgs& args) {
  const auto tensor = [&](size_t idx) { return args.in(kTopologyInput + idx).as<int32_t>(); };
  return {.block_size = static_cast<int>(spec.block_size),
          .max_block_rows = args.in(kTopologyInput).shape[0] - 1,
          .num_block_cols = args.in(kTopologyInput + 3).shape[0] - 1,
          .max_blocks = args.in(kTopologyInput + 1).shape[0],
          .row_offsets = tensor(0),
          .col_indices = tensor(1),
          .row_indices = tensor(2),
          .col_offsets = tensor(3),
          .transpose_indices = tensor(4)};
}

/// Only the sparse matrix's rows are ragged (check_ragged): the last dim of a left operand that
/// enters transposed.
DenseOperand operand_of(const KernelArgs& args, size_t idx, bool transposed) {
  const Tensor& tensor = args.in(idx);
  const bool ragged = idx == 0 && transposed;
  return {.data = tensor.data,
          .columns = {tensor.shape[1], ragged ? args.in_extent(idx) : nullptr},
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
  if (!fits_expert_products(matrix, {args.in(0).data, args.in(1).data, args.out(0).data}))
    return std::nullopt;
  matrix.experts = context_of(args).get<ExpertTables>().blocks(*op.experts(), wide);
  return matrix;
}

int* counter_of(const KernelArgs& args) {
  return context_of(args).get<ExpertTables>().counter();
}

/// SDD and SDDᵀ of experts; whether it was one that the kernels on tensor cores take.
bool run_expert_sdd(const BlockSparseProduct& op, const KernelArgs& args) {
  const Tensor& left = args.in(0);
  if (op.spec().transpose_left) return false;
  const auto matrix = expert_matrix(op, args, args.out(0), left, left.shape[1]);
  if (!matrix) return false;
  expert_rows({.matrix = *matrix,
               .gives_values = true,
               .dense = left.data,
               .num_rows = left.shape[0],
               .weight = args.in(1).data,
               .weight_by_rows = op.spec().transpose_right,
               .counter = counter_of(args)},
              stream_of(args));
  return true;
}

/// The same of DSD and DSDᵀ.
bool run_expert_dsd(const BlockSparseProduct& op, const KernelArgs& args) {
  const BlockSparseProductSpec& spec = op.spec();
  const Tensor& out = args.out(0);
  if (spec.kind != ProductKind::kDsd || spec.transpose_left || spec.accumulate) return false;
  const auto matrix = expert_matrix(op, args, args.in(0), out, out.shape[1]);
  if (!matrix) return false;
  // Rows of no expert are zero, unless they are beyond the actual ones.
  if (args.out_extent(0) == nullptr)
    check(cudaMemsetAsync(out.data, 0, static_cast<size_t>(out.num_bytes()), stream_of(args)));
  expert_rows({.matrix = *matrix,
               .gives_values = false,
               .dense = out.data,
               .num_rows = out.shape[0],
               .weight = args.in(1).data,
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
  const Tensor& dense = args.in(by_rows ? 1 : 0);
  const auto matrix = expert_matrix(op, args, args.in(by_rows ? 0 : 1), dense, dense.shape[1]);
  if (!matrix) return false;
  expert_wgrad({.matrix = *matrix,
                .dense = dense.data,
                .num_rows = dense.shape[0],
                .grad = args.out(0).as<float>(),
                .grad_by_rows = by_rows,
                .accumulate = !args.set_accumulators,
                .counter = counter_of(args)},
               stream_of(args));
  return true;
}

void sdd(const Operator& base, const KernelArgs& args) {
  const auto& op = static_cast<const BlockSparseProduct&>(base);
  if (run_expert_sdd(op, args)) return;
  const BlockSparseProductSpec& spec = op.spec();
  launch_sparse_output({.topology = topology_of(spec, args),
                        .type = type_of(args.in(0)),
                        .inner = args.in(0).shape[spec.transpose_left ? 0 : 1],
                        .left = operand_of(args, 0, spec.transpose_left),
                        .right = operand_of(args, 1, spec.transpose_right),
                        .values = args.out(0).data},
                       stream_of(args));
  check(cudaGetLastError());
}

void dense_product(const Operator& base, const KernelArgs& args) {
  const auto& op = static_cast<const BlockSparseProduct&>(base);
  const BlockSparseProductSpec& spec = op.spec();
  const Tensor& out = args.out(0);
  if (!out || run_expert_dsd(op, args) || run_expert_wgrad(op, args)) return;
  if (args.set_accumulators)
    check(cudaMemsetAsync(out.data, 0, static_cast<size_t>(out.num_bytes()), stream_of(args)));
  const bool sparse_left = op.is_sparse(0);
  const bool sparse_transposed = sparse_left ? spec.transpose_left : spec.transpose_right;
  const bool dense_transposed = sparse_left ? spec.transpose_right : spec.transpose_left;
  const bool by_rows = sparse_left != sparse_transposed;
  const size_t dense_input = sparse_left ? 1 : 0;
  const Tensor& dense = args.in(dense_input);
  const bool cross_contiguous = sparse_left == dense_transposed;
  const bool dense_ragged = !by_rows && cross_contiguous;
  const bool out_ragged = by_rows && !sparse_left;
  launch_dense_output(
      {.topology = topology_of(spec, args),
       .type = type_of(dense),
       .by_rows = by_rows,
       .outer = out.shape[sparse_left ? 1 : 0],
       .values = args.in(sparse_left ? 0 : 1).data,
       .dense = dense.data,
       .dense_columns = {dense.shape[1], dense_ragged ? args.in_extent(dense_input) : nullptr},
       .cross_contiguous = cross_contiguous,
       .out = spec.accumulate ? nullptr : out.data,
       .sum = spec.accumulate ? out.as<float>() : nullptr,
       .outer_contiguous = sparse_left,
       .out_columns = {out.shape[1], out_ragged ? args.out_extent(0) : nullptr},
       .rows = by_rows ? args.out_extent(0) : nullptr},
      stream_of(args));
  check(cudaGetLastError());
}

/// No memory is needed; this is where a product is seen with its types. A dense operand may be
/// ragged in the sparse matrix's rows alone, since its kernel cannot tell which dim an extent is
/// of.
int64_t check_ragged(const Operator& base, std::span<const ValueType> inputs) {
  const auto& op = static_cast<const BlockSparseProduct&>(base);
  const BlockSparseProductSpec& spec = op.spec();
  for (int operand = 0; operand < 2; ++operand) {
    const ValueType& type = inputs[static_cast<size_t>(operand)];
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

SparseActivation activation_of(const BlockSparseActivationSpec& spec, const KernelArgs& args,
                               size_t probs) {
  const Tensor& probs_R = args.in(probs);
  return {.activation = spec.activation,
          .type = type_of(args.in(probs - 1)),
          .block_size = static_cast<int>(spec.block_size),
          .num_rows = probs_R.shape[0] / spec.block_size * spec.block_size,
          .extent = args.in_extent(probs),
          .row_offsets = args.in(probs + 1).as<int32_t>(),
          .pre = args.in(probs - 1).data,
          .probs_R = probs_R.as<float>(),
          .grad = nullptr,
          .out = nullptr,
          .grad_pre = nullptr,
          .grad_probs_R = nullptr};
}

void sparse_activation(const Operator& op, const KernelArgs& args) {
  SparseActivation call =
      activation_of(static_cast<const BlockSparseActivation&>(op).spec(), args, 1);
  call.out = args.out(0).data;
  launch_sparse_activation(call, stream_of(args));
  check(cudaGetLastError());
}

void sparse_activation_backward(const Operator& op, const KernelArgs& args) {
  SparseActivation call =
      activation_of(static_cast<const BlockSparseActivationBackward&>(op).spec(), args, 2);
  call.grad = args.in(0).data;
  call.grad_pre = args.out(0).data;
  call.grad_probs_R = args.out(1).as<float>();
  launch_sparse_activation_backward(call, stream_of(args));
  check(cudaGetLastError());
}

}  // namespace

void add_block_sparse_cuda(KernelTable& table) {
  table["block_topology"] = Kernel(block_topology, topology_workspace);
  table["sdd"] = Kernel(sdd, check_ragged);
  table["dsd"] = Kernel(dense_product, check_ragged).setting_accumulators();
  table["dds"] = Kernel(dense_product, check_ragged).setting_accumulators();
  table["block_sparse_activation"] = sparse_activation;
  table["block_sparse_activation_backward"] = sparse_activation_backward;
}

}  // namespace tessera
