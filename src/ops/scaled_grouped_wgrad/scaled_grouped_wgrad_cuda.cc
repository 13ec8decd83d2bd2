#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad_cuda.h"

#include "ops/cuda/tensor_map.h"
#include "ops/grouped_matmul/whole_offsets.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad.h"
#include "ops/scaled_grouped_wgrad/scaled_wgrad_kernels.h"

namespace tessera {
namespace cuda {

void scaled_wgrad(const ScaledWgrad& product, cudaStream_t stream) {
  const ExpertBlocks& experts = product.experts;
  const int64_t num_blocks = num_token_blocks(product.num_tokens, experts.num_experts);
  if (num_blocks == 0) {
    ensure(product.accumulate, "a gradient of no tokens is to be written");
    return;
  }
  constexpr int kBoxRows = 64;
  ScaledWgradParams params{};
  params.narrow =
      make_byte_map({product.narrow, experts.largest, num_blocks * kTokenBlock}, kBoxRows);
  params.wide = make_byte_map({product.wide, experts.wide, num_blocks * kTokenBlock}, kBoxRows);
  params.grad = product.grad;
  params.block_begin = experts.begin;
  params.offsets = experts.offsets;
  params.num_experts = experts.num_experts;
  params.num_columns = static_cast<int>(experts.wide);
  params.num_rows = product.num_tokens;
  params.weight_rows = experts.total;
  params.accumulate = product.accumulate;
  params.counter = product.counter;
  params.narrow_scales = product.narrow_scales;
  params.wide_scales = product.wide_scales;
  params.narrow_columns = static_cast<int>(experts.largest);
  product.by_block ? launch_scaled_wgrad_blocks(params, stream)
                   : launch_scaled_wgrad_rows(params, stream);
}

}  // namespace cuda

namespace {

using Op = ScaledGroupedWgrad;
using cuda::context_of;

/// What the kernels do not take is refused before anything runs.
int64_t check_sizes(const Op& op, std::span<const ValueType> inputs) {
  const int64_t columns = inputs[Op::kWide].shape[0];
  check_shape(op, has_scaled_wgrad(op.sizes(), columns),
              "on a GPU both sizes of experts must be multiples of {}, and experts at most {}; got "
              "{} of {} columns",
              QuantizeTokens::kUnit, cuda::kGroupedMaxExperts, op.sizes().to_string(), columns);
  return 0;
}

void multiply(const Op& op, const Args<Op>& args) {
  const Tensor& grad = args.out(Op::kGradWeight);
  if (!grad) return;
  auto& tables = context_of(args).get<cuda::ExpertTables>();
  cuda::ExpertBlocks experts = tables.blocks(op.sizes(), grad.shape[1]);
  experts.offsets = args.inputs.size() > Op::kOffsets
                        ? args.in(Op::kOffsets).as<int64_t>()
                        : context_of(args).get<cuda::WholeOffsets>().of(op.num_tokens());
  cuda::scaled_wgrad({.experts = experts,
                      .by_block = op.by_block(),
                      .num_tokens = op.num_tokens(),
                      .narrow = args.in(Op::kNarrow).data,
                      .narrow_scales = args.in(Op::kNarrowScales).as<float>(),
                      .wide = args.in(Op::kWide).data,
                      .wide_scales = args.in(Op::kWideScales).as<float>(),
                      .grad = grad.as<float>(),
                      .accumulate = !args.set_accumulators,
                      .counter = tables.counter()},
                     cuda::stream_of(args));
}

}  // namespace

void add_scaled_grouped_wgrad_cuda(KernelTable& table) {
  add_kernel<Op>(table, multiply,
                 {.workspace = check_sizes, .sets_accumulators = true, .takes = takes_e4m3_codes});
}

}  // namespace tessera
