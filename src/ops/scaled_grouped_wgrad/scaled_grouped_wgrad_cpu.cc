#include <array>

#include "core/fp8.h"
#include "ops/gemm/gemm.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using Op = ScaledGroupedWgrad;

/// Scratch memory: one expert's operands in F32.
struct Scratch {
  int64_t narrow = 0;
  int64_t wide = 0;
  int64_t num_bytes = 0;

  Scratch(const Op& op, int64_t num_columns) {
    WorkspaceLayout layout;
    narrow = layout.add<float>(op.sizes().largest() * op.num_tokens());
    wide = layout.add<float>(num_columns * op.num_tokens());
    num_bytes = layout.num_bytes();
  }
};

/// An expert's tokens, and where they lie among the codes.
struct Tokens {
  int64_t expert = 0;
  int64_t count = 0;
  int64_t first_block = 0;
};

/// The first `num_rows` rows of an operand, of one expert's tokens, as F32 values [num_rows,
/// count].
void read_tokens(const Op& op, const Tensor& codes, const Tensor& scales, const Tokens& tokens,
                 int64_t num_rows, float* to) {
  const int64_t width = scales.shape[1];
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    const E4m3* const from =
        codes.as<E4m3>() + row * codes.shape[1] + tokens.first_block * kTokenBlock;
    for (int64_t t = 0; t < tokens.count; ++t) {
      const int64_t at = op.by_block() ? tokens.first_block + t / kTokenBlock : tokens.expert;
      to[row * tokens.count + t] =
          static_cast<float>(from[t]) * scales.as<float>()[at * width + row];
    }
  }
}

void multiply(const Op& op, const Args<Op>& args) {
  const Tensor& grad = args.out(Op::kGradWeight);
  if (!grad) return;
  const int64_t columns = grad.shape[1];
  const std::array<int64_t, 2> all = {0, op.num_tokens()};
  std::span<const int64_t> offsets = all;
  if (args.inputs.size() > Op::kOffsets) offsets = args.in(Op::kOffsets).span<int64_t>();
  const Scratch scratch(op, columns);
  auto* const narrow = workspace_part<float>(args.workspace, scratch.narrow);
  auto* const wide = workspace_part<float>(args.workspace, scratch.wide);
  int64_t weight_row = 0;
  for (int64_t e = 0; e < op.sizes().num_experts(); ++e) {
    const Tokens tokens{e, offsets[e + 1] - offsets[e], first_token_block(offsets[e], e)};
    read_tokens(op, args.in(Op::kNarrow), args.in(Op::kNarrowScales), tokens, op.sizes()[e],
                narrow);
    read_tokens(op, args.in(Op::kWide), args.in(Op::kWideScales), tokens, columns, wide);
    gemm({.transpose_b = true,
          .m = op.sizes()[e],
          .n = columns,
          .k = tokens.count,
          .a = narrow,
          .lda = tokens.count,
          .b = wide,
          .ldb = tokens.count,
          .c = grad.as<float>() + weight_row * columns,
          .ldc = columns,
          .accumulate = !args.set_accumulators});
    weight_row += op.sizes()[e];
  }
}

}  // namespace

void add_scaled_grouped_wgrad_cpu(KernelTable& table) {
  add_kernel<Op>(table, multiply,
                 {.workspace =
                      [](const Op& op, std::span<const ValueType> inputs) {
                        return Scratch(op, inputs[Op::kWide].shape[0]).num_bytes;
                      },
                  .sets_accumulators = true,
                  .takes = takes_e4m3_codes});
}

}  // namespace tessera
