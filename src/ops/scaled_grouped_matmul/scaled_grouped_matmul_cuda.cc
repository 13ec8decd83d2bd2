#include "ops/scaled_grouped_matmul/scaled_grouped_matmul_cuda.h"

#include "ops/cuda/tensor_map.h"
#include "ops/grouped_matmul/whole_offsets.h"
#include "ops/scaled_grouped_matmul/scaled_grouped_matmul.h"
#include "ops/scaled_grouped_matmul/scaled_kernels.h"

namespace tessera {
namespace cuda {

void scaled_rows(const ScaledRows& product, cudaStream_t stream) {
  if (product.num_rows == 0) return;
  constexpr int64_t kBlock = ScaledGroupedMatmul::kBlock;
  const ExpertBlocks& experts = product.experts;
  ScaledRowsParams params{};
  params.weight = make_byte_map({product.weight, experts.total, experts.wide},
                                product.by_block ? kScaledBlocksBoxRows : kGroupedFeatures);
  params.a = make_byte_map({product.a, product.num_rows, experts.wide}, kGroupedBoxRows);
  params.y_map = make_tensor_map({product.y, product.num_rows, experts.largest}, kGroupedStoreRows);
  params.y = product.y;
  params.y_columns = static_cast<int>(experts.largest);
  params.a_scales = product.a_scales;
  params.weight_scales = product.weight_scales;
  params.num_blocks = static_cast<int>((experts.wide + kBlock - 1) / kBlock);
  set_experts(params, experts, product.counter);
  product.by_block ? launch_scaled_blocks(params, stream) : launch_scaled_rows(params, stream);
}

}  // namespace cuda

namespace {

using Op = ScaledGroupedMatmul;
using cuda::context_of;
using cuda::stream_of;

/// What the kernels do not take is refused before anything runs.
int64_t check_types(const Op& op, std::span<const ValueType> inputs) {
  const int64_t reduction = inputs[Op::kWeight].shape[1];
  check_shape(op, op.output() == DType::kBF16, "gives bf16 on a GPU, not {}",
              dtype_name(op.output()));
  check_shape(op, reduction % 16 == 0 && reduction > 0,
              "on a GPU rows must be multiples of 16 values, got {}", reduction);
  check_shape(op, op.sizes().largest() % 8 == 0,
              "on a GPU experts must be multiples of 8 rows, got {}", op.sizes().to_string());
  check_shape(op, op.sizes().num_experts() <= cuda::kGroupedMaxExperts,
              "on a GPU there can be {} experts, got {}", cuda::kGroupedMaxExperts,
              op.sizes().num_experts());
  return 0;
}

void multiply(const Op& op, const Args<Op>& args) {
  const Tensor& a = args.in(Op::kA);
  const Tensor& weight = args.in(Op::kWeight);
  auto& tables = context_of(args).get<cuda::ExpertTables>();
  cuda::ExpertBlocks experts = tables.blocks(op.sizes(), weight.shape[1]);
  experts.offsets = args.inputs.size() > Op::kOffsets
                        ? args.in(Op::kOffsets).as<int64_t>()
                        : context_of(args).get<cuda::WholeOffsets>().of(a.shape[0]);
  cuda::scaled_rows({.experts = experts,
                     .by_block = a.scale.kind == ScaleLayout::Kind::kBlock,
                     .num_rows = a.shape[0],
                     .a = a.data,
                     .a_scales = scales_of(a).as<float>(),
                     .weight = weight.data,
                     .weight_scales = scales_of(weight).as<float>(),
                     .y = args.out(Op::kY).data,
                     .counter = tables.counter()},
                    stream_of(args));
}

}  // namespace

void add_scaled_grouped_matmul_cuda(KernelTable& table) {
  add_kernel<Op>(table, multiply, {.workspace = check_types, .takes = takes_e4m3});
}

}  // namespace tessera
