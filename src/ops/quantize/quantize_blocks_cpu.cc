#include <algorithm>
#include <cmath>

#include "core/fp8.h"
#include "ops/quantize/quantize_blocks.h"
#include "ops/round_values/round_math.h"

namespace tessera {
namespace {

/// Where a block lies in rows of `stride` elements.
struct MatrixBlock {
  int64_t first = 0;
  int64_t stride = 0;
  int64_t num_rows = 0;
  int64_t num_columns = 0;

  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t begin = first + row * stride;
      for (int64_t i = begin; i < begin + num_columns; ++i) visit(i);
    }
  }
};

void quantize_blocks(const QuantizeBlocks& /*op*/, const Args<QuantizeBlocks>& args) {
  const Tensor& x = args.in(QuantizeBlocks::kX);
  const auto* const from = x.as<float>();
  auto* const to = args.out(QuantizeBlocks::kY).as<E4m3>();
  const auto scales = args.out(QuantizeBlocks::kScales).span<float>();
  const int64_t across = args.out(QuantizeBlocks::kScales).shape[1];
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < std::ssize(scales); ++i) {
    const int64_t row = i / across * QuantizeBlocks::kBlock;
    const int64_t column = i % across * QuantizeBlocks::kBlock;
    const MatrixBlock block{.first = row * x.shape[1] + column,
                            .stride = x.shape[1],
                            .num_rows = std::min(QuantizeBlocks::kBlock, x.shape[0] - row),
                            .num_columns = std::min(QuantizeBlocks::kBlock, x.shape[1] - column)};
    float amax = 0;
    block.for_each([&](int64_t at) { amax = std::fmax(amax, std::fabs(from[at])); });
    scales[i] = scale_of_block<E4m3>(amax, /*unit=*/1, /*nested=*/false);
    const float factor = 1 / scales[i];
    block.for_each([&](int64_t at) { to[at] = E4m3(from[at] * factor); });
  }
}

}  // namespace

void add_quantize_blocks_cpu(KernelTable& table) {
  add_kernel<QuantizeBlocks>(table, quantize_blocks);
}

}  // namespace tessera
