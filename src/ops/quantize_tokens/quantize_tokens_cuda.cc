#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/quantize_tokens/quantize_tokens_kernels.h"
#include "ops/quantize_tokens/token_blocks.h"

namespace tessera {
namespace {

using Op = QuantizeTokens;

/// What a grid has in its dims but the first.
constexpr int64_t kMostBlocks = 65535;

/// What the kernels do not take is refused before anything runs.
int64_t check_types(const Op& op, std::span<const ValueType> inputs) {
  const ValueType& x = inputs[Op::kX];
  const int64_t num_groups = inputs.size() > Op::kOffsets ? inputs[Op::kOffsets].shape[0] - 1 : 1;
  check_shape(op, x.dtype == DType::kBF16 && x.shape[1] % Op::kUnit == 0,
              "on a GPU takes bf16 rows of multiples of {} values, got {}", Op::kUnit,
              x.to_string());
  cuda::check_limit(op, num_token_blocks(x.shape[0], num_groups), kMostBlocks,
                    "blocks of 128 tokens");
  return 0;
}

void quantize_tokens(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const bool has_groups = args.inputs.size() > Op::kOffsets;
  if (x.shape[1] == 0) return;
  cuda::launch_quantize_tokens(
      {.x = x.data,
       .y = static_cast<uint8_t*>(args.out(Op::kY).data),
       .scales = args.out(Op::kScales).as<float>(),
       .offsets = has_groups ? args.in(Op::kOffsets).as<int64_t>() : nullptr,
       .num_rows = x.shape[0],
       .num_columns = x.shape[1],
       .num_groups = has_groups ? static_cast<int>(args.in(Op::kOffsets).shape[0] - 1) : 1,
       .by_block = op.is_by_block()},
      cuda::stream_of(args));
}

}  // namespace

void add_quantize_tokens_cuda(KernelTable& table) {
  add_kernel<Op>(table, quantize_tokens, {.workspace = check_types, .takes = takes_e4m3_codes});
}

}  // namespace tessera
