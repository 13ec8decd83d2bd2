#include "ops/expert_activation/activated_product.h"

#include "ops/cuda/tensor_map.h"
#include "ops/expert_activation/activated_product_kernels.h"
#include "ops/grouped_matmul/grouped_matmul_cuda.h"
#include "ops/grouped_matmul/grouped_tile_rule.h"

namespace tessera {
namespace {

using cuda::context_of;
using cuda::stream_of;

const KernelTable& parts() {
  static const KernelTable kTable = [] {
    KernelTable table;
    add_grouped_matmul_cuda(table);
    add_expert_activation_cuda(table);
    return table;
  }();
  return kTable;
}

/// Scratch memory of the steps that are made one after the other, which are checked by the way.
int64_t activation_bytes(const ExpertActivation& op) {
  return parts().find(op.name())->second.workspace_bytes(op, {});
}

/// Whether one kernel does all: the experts' size F is one, a multiple of 8, and the activation the
/// one that the kernels have.
bool has_kernel(const ExpertActivation& op, DType dtype, int64_t wide) {
  const ExpertSizes& sizes = op.sizes();
  return op.function().kind == Activation::kSwiGLU && sizes.are_equal() &&
         sizes.largest() % 8 == 0 &&
         cuda::runs_in_tiles({.dtype = dtype,
                              .num_experts = sizes.num_experts(),
                              .wide = wide,
                              .largest = sizes.largest()});
}

void check_aligned(const Operator& op, std::initializer_list<const void*> matrices) {
  for (const void* matrix : matrices)
    ensure(reinterpret_cast<uintptr_t>(matrix) % 16 == 0,
           "{}: a matrix does not begin at a multiple of 16 bytes", op.name());
}

/// What both kernels take of a product by rows, whose inputs are the first of theirs, except for
/// the maps of weight and y.
template <typename Params>
Params make_params(const KernelArgs& args, const GroupedMatmul& product, const Tensor& y) {
  const Tensor& a = args.in(GroupedMatmul::kA);
  const Tensor& weight = args.in(GroupedMatmul::kWeight);
  auto& tables = context_of(args).get<cuda::ExpertTables>();
  cuda::ExpertBlocks experts = tables.blocks(product.sizes(), weight.shape[1]);
  experts.offsets = args.in(GroupedMatmul::kOffsets).as<int64_t>();
  Params params = {};
  params.a = cuda::make_tensor_map({a.data, a.shape[0], experts.wide}, cuda::kActivatedBoxTokens);
  params.y = y.data;
  params.y_columns = static_cast<int>(y.shape[1]);
  cuda::set_experts(params, experts, tables.counter());
  return params;
}

bool has_kernel(const ActivatedProduct& op, const ValueType& a) {
  return a.shape[0] > 0 && !op.product().gather() &&
         has_kernel(op.activation(), a.dtype, a.shape[1]);
}

int64_t activated_product_workspace(const ActivatedProduct& op, std::span<const ValueType> inputs) {
  if (has_kernel(op, inputs[ActivatedProduct::kA])) return 0;
  return activated_product_bytes(op, inputs, activation_bytes(op.activation()));
}

void run_kernel(const ActivatedProduct& op, const Args<ActivatedProduct>& args) {
  using Op = ActivatedProduct;
  const Tensor& a = args.in(Op::kA);
  const Tensor& weight = args.in(Op::kWeight);
  const Tensor& act = args.out(Op::kAct);
  const Tensor pre = op.keeps_pre() ? args.out(Op::kPre) : Tensor{};
  check_aligned(op, {a.data, weight.data, act.data, pre.data});
  const ExpertSizes& sizes = op.activation().sizes();
  const Tensor y = {pre.data, act.dtype, {act.shape[0], 2 * sizes.largest()}};
  auto params = make_params<cuda::ActivatedRowsParams>(args, op.product(), y);
  const auto store_map = [](const Tensor& to) {
    return cuda::make_tensor_map({to.data, to.shape[0], to.shape[1]}, cuda::kGroupedStoreRows,
                                 cuda::kActivatedStoreColumns);
  };
  if (op.keeps_pre()) params.y_map = store_map(pre);
  params.weight = cuda::make_pairs_map({.data = weight.data,
                                        .num_matrices = sizes.num_experts(),
                                        .num_pairs = sizes.largest(),
                                        .num_columns = weight.shape[1]},
                                       cuda::kGroupedFeatures);
  params.act_map = store_map(act);
  params.act = act.data;
  if (op.activation().apply_prob()) params.probs = args.in(Op::kProbs).as<float>();
  cuda::launch_activated_rows(params, stream_of(args));
}

void activated_product(const ActivatedProduct& op, const Args<ActivatedProduct>& args) {
  const Tensor& a = args.in(ActivatedProduct::kA);
  if (args.out(ActivatedProduct::kAct).shape[0] == 0) return;
  has_kernel(op, {.dtype = a.dtype, .shape = a.shape}) ? run_kernel(op, args)
                                                       : run_activated_product(op, args, parts());
}

bool has_kernel(const ActivationGradProduct& op, const ValueType& grad) {
  return has_kernel(op.activation(), grad.dtype, grad.shape[1]);
}

int64_t num_partials(const ActivationGradProduct& op) {
  constexpr int64_t kFeatures = cuda::kProbPartialFeatures;
  return (op.activation().sizes().largest() + kFeatures - 1) / kFeatures;
}

int64_t activation_grad_product_workspace(const ActivationGradProduct& op,
                                          std::span<const ValueType> inputs) {
  const ValueType& grad = inputs[ActivationGradProduct::kGrad];
  if (!has_kernel(op, grad))
    return activation_grad_product_bytes(op, inputs, activation_bytes(op.activation()));
  return op.activation().apply_prob()
             ? num_partials(op) * grad.shape[0] * static_cast<int64_t>(sizeof(float))
             : 0;
}

void run_kernel(const ActivationGradProduct& op, const Args<ActivationGradProduct>& args) {
  using Op = ActivationGradProduct;
  const Tensor& grad = args.in(Op::kGrad);
  const Tensor& weight = args.in(Op::kWeight);
  const Tensor& pre = args.in(Op::kPre);
  const Tensor& grad_pre = args.out(Op::kGradPre);
  const bool apply_prob = op.activation().apply_prob();
  const Tensor act = op.gives_act() ? args.out(Op::kAct) : Tensor{};
  check_aligned(op, {grad.data, weight.data, pre.data, grad_pre.data, act.data});
  const int64_t num_rows = grad.shape[0];
  auto params = make_params<cuda::ActivationGradParams>(args, op.product(), grad_pre);
  params.weight = cuda::make_tensor_map({weight.data, weight.shape[0], weight.shape[1]},
                                        cuda::kGroupedFeatures);
  const auto piece_map = [](const Tensor& rows) {
    return cuda::make_tensor_map({rows.data, rows.shape[0], rows.shape[1]},
                                 cuda::kGroupedStoreRows);
  };
  params.pre_map = piece_map(pre);
  params.y_map = piece_map(grad_pre);
  if (op.gives_act()) params.act_map = piece_map(act);
  params.act = act.data;
  params.num_rows = num_rows;
  if (apply_prob) {
    params.probs = args.in(Op::kProbs).as<float>();
    params.prob_partials = reinterpret_cast<float*>(args.workspace.data());
  }
  cuda::launch_activation_grad(params, stream_of(args));
  if (!apply_prob) return;
  cuda::launch_prob_sums({.partials = params.prob_partials,
                          .num_partials = static_cast<int>(num_partials(op)),
                          .num_rows = num_rows,
                          .num_rows_in_use = params.offsets + params.num_experts,
                          .grad_probs = args.out(Op::kGradProbs).as<float>()},
                         stream_of(args));
}

void activation_grad_product(const ActivationGradProduct& op,
                             const Args<ActivationGradProduct>& args) {
  const Tensor& grad = args.in(ActivationGradProduct::kGrad);
  if (grad.shape[0] == 0) return;
  has_kernel(op, {.dtype = grad.dtype, .shape = grad.shape})
      ? run_kernel(op, args)
      : run_activation_grad_product(op, args, parts());
}

}  // namespace

void add_activated_product_cuda(KernelTable& table) {
  add_kernel<ActivatedProduct>(table, activated_product,
                               {.workspace = activated_product_workspace});
  add_kernel<ActivationGradProduct>(table, activation_grad_product,
                                    {.workspace = activation_grad_product_workspace});
}

}  // namespace tessera
