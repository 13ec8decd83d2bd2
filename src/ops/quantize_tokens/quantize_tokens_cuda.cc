#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/permute/row_maps.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/quantize_tokens/quantize_tokens_kernels.h"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/scaled_rows.h"

namespace tessera {
namespace {

using Op = QuantizeTokens;

/// What a grid has in its dims but the first.
constexpr int64_t kMostBlocks = 65535;

/// What the kernels do not take is refused before anything runs.
int64_t check_types(const Op& op, std::span<const ValueType> inputs) {
  const ValueType& x = inputs[Op::kX];
  const int64_t num_groups = inputs.size() > Op::kOffsets ? inputs[Op::kOffsets].shape[0] - 1 : 1;
  const int64_t num_rows = op.gather() ? inputs[Op::kSource].shape[0] : x.shape[0];
  const bool has_values = x.dtype == DType::kBF16 || x.scale.is_scaled();
  check_shape(op, has_values && x.shape[1] % Op::kUnit == 0,
              "on a GPU takes rows of bf16 or fp8 of multiples of {} values, got {}", Op::kUnit,
              x.to_string());
  check_shape(op, columns_of_scale(x.scale, x.shape[1]) % Op::kUnit == 0,
              "on a GPU scales must be of multiples of 16 columns, got {}", x.to_string());
  cuda::check_limit(op, num_token_blocks(num_rows, num_groups), kMostBlocks,
                    "blocks of 128 tokens");
  return 0;
}

void quantize_tokens(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const bool has_groups = args.inputs.size() > Op::kOffsets;
  if (x.shape[1] == 0) return;
  cuda::launch_quantize_tokens(
      {.dtype = x.dtype,
       .x = x.data,
       .row_scales = x.scale.is_scaled() ? row_scales_of(x).as<float>() : nullptr,
       .columns_of_scale = columns_of_scale(x.scale, x.shape[1]),
       .y = static_cast<uint8_t*>(args.out(Op::kY).data),
       .scales = args.out(Op::kScales).as<float>(),
       .offsets = has_groups ? args.in(Op::kOffsets).as<int64_t>() : nullptr,
       .num_rows = op.gather() ? args.in(Op::kSource).shape[0] : x.shape[0],
       .num_columns = x.shape[1],
       .num_groups = has_groups ? static_cast<int>(args.in(Op::kOffsets).shape[0] - 1) : 1,
       .by_block = op.is_by_block(),
       .source = op.gather() ? args.in(Op::kSource).as<int32_t>() : nullptr,
       .top_k = op.gather()
                    ? cuda::Divider(static_cast<uint32_t>(top_k_of(args.in(Op::kRowOf).shape)))
                    : cuda::Divider()},
      cuda::stream_of(args));
}

}  // namespace

void add_quantize_tokens_cuda(KernelTable& table) {
  add_kernel<Op>(table, quantize_tokens, {.workspace = check_types, .takes = takes_tokens});
}

}  // namespace tessera
