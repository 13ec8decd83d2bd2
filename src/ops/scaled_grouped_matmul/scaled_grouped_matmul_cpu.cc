#include <algorithm>
#include <array>

#include "core/fp8.h"
#include "ops/gemm/gemm.h"
#include "ops/scaled_grouped_matmul/scaled_grouped_matmul.h"
#include "ops/storage.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using Op = ScaledGroupedMatmul;

/// Scratch memory: one expert's operands and results in F32.
struct Scratch {
  int64_t a = 0;
  int64_t weight = 0;
  int64_t y = 0;
  int64_t num_bytes = 0;

  Scratch(int64_t num_rows, int64_t largest, int64_t reduction) {
    WorkspaceLayout layout;
    a = layout.add<float>(num_rows * reduction);
    weight = layout.add<float>(largest * reduction);
    y = layout.add<float>(num_rows * largest);
    num_bytes = layout.num_bytes();
  }
};

/// Rows [first, first + count) of a scaled matrix as F32 values.
void read_rows(const Tensor& from, int64_t first, int64_t count, float* to) {
  const int64_t num_columns = from.shape[1];
  const bool by_row = from.scale.kind == ScaleLayout::Kind::kRow;
  const int64_t rows = by_row ? 1 : from.scale.rows;
  const int64_t columns = by_row ? std::max<int64_t>(num_columns, 1) : from.scale.columns;
  const int64_t across = (num_columns + columns - 1) / columns;
  const auto* const elements = from.as<E4m3>();
  const auto* const scales = scales_of(from).as<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = first; row < first + count; ++row) {
    for (int64_t i = 0; i < num_columns; ++i) {
      to[(row - first) * num_columns + i] = static_cast<float>(elements[row * num_columns + i]) *
                                            scales[row / rows * across + i / columns];
    }
  }
}

void multiply(const Op& op, const Args<Op>& args) {
  const Tensor& a = args.in(Op::kA);
  const Tensor& weight = args.in(Op::kWeight);
  const Tensor& y = args.out(Op::kY);
  const std::array<int64_t, 2> all = {0, a.shape[0]};
  std::span<const int64_t> offsets = all;
  if (args.inputs.size() > Op::kOffsets) offsets = args.in(Op::kOffsets).span<int64_t>();
  const int64_t reduction = weight.shape[1];
  const Scratch scratch(a.shape[0], op.sizes().largest(), reduction);
  auto* const a_values = workspace_part<float>(args.workspace, scratch.a);
  auto* const weight_values = workspace_part<float>(args.workspace, scratch.weight);
  auto* const results = workspace_part<float>(args.workspace, scratch.y);
  int64_t weight_row = 0;
  for (int64_t e = 0; e < op.sizes().num_experts(); ++e) {
    const int64_t size = op.sizes()[e];
    const int64_t count = offsets[e + 1] - offsets[e];
    read_rows(a, offsets[e], count, a_values);
    read_rows(weight, weight_row, size, weight_values);
    gemm({.transpose_b = true,
          .m = count,
          .n = size,
          .k = reduction,
          .a = a_values,
          .lda = reduction,
          .b = weight_values,
          .ldb = reduction,
          .c = results,
          .ldc = size});
    with_storage(y.dtype, [&](auto storage) {
      using T = decltype(storage);
      for (int64_t row = 0; row < count; ++row)
        std::transform(results + row * size, results + (row + 1) * size,
                       y.as<T>() + (offsets[e] + row) * y.shape[1], [](float x) { return T(x); });
    });
    weight_row += size;
  }
}

}  // namespace

void add_scaled_grouped_matmul_cpu(KernelTable& table) {
  add_kernel<Op>(table, multiply,
                 {.workspace =
                      [](const Op& op, std::span<const ValueType> inputs) {
                        return Scratch(inputs[Op::kA].shape[0], op.sizes().largest(),
                                       inputs[Op::kWeight].shape[1])
                            .num_bytes;
                      },
                  .takes = takes_e4m3});
}

}  // namespace tessera
