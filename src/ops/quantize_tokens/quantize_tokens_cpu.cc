#include <algorithm>
#include <array>
#include <cmath>

#include "core/fp8.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/round_values/round_math.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using Op = QuantizeTokens;

/// Tokens of one column that share a scale, and where they go.
struct TokenRun {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t to_column = 0;  ///< of y
  int64_t scale_row = 0;
};

/// The runs of every column. Those of groups without tokens have a scale.
std::vector<TokenRun> find_runs(const Op& op, std::span<const int64_t> offsets) {
  std::vector<TokenRun> runs;
  for (int64_t group = 0; group + 1 < std::ssize(offsets); ++group) {
    const int64_t first = offsets[group];
    const int64_t count = offsets[group + 1] - first;
    const int64_t block = first_token_block(first, group);
    if (!op.is_by_block()) {
      runs.push_back({first, count, block * kTokenBlock, group});
      continue;
    }
    for (int64_t i = 0; i < token_blocks_of(count); ++i)
      runs.push_back({first + i * kTokenBlock, std::min(kTokenBlock, count - i * kTokenBlock),
                      (block + i) * kTokenBlock, block + i});
  }
  return runs;
}

/// One column of x, which is a row of y.
template <typename T>
void quantize_column(std::span<const TokenRun> runs, const Tensor& x, int64_t column, E4m3* y,
                     const Tensor& scales) {
  const int64_t num_columns = x.shape[1];
  for (const TokenRun& run : runs) {
    const T* const from = x.as<T>() + run.first_row * num_columns + column;
    float amax = 0;
    for (int64_t i = 0; i < run.num_rows; ++i)
      amax = std::fmax(amax, std::fabs(static_cast<float>(from[i * num_columns])));
    const float scale = scale_of_block<E4m3>(amax, /*unit=*/1, /*nested=*/false);
    const float factor = 1 / scale;
    E4m3* const to = y + run.to_column;
    for (int64_t i = 0; i < run.num_rows; ++i)
      to[i] = E4m3(static_cast<float>(from[i * num_columns]) * factor);
    std::fill(to + run.num_rows, to + token_blocks_of(run.num_rows) * kTokenBlock, E4m3(0.0F));
    scales.as<float>()[run.scale_row * num_columns + column] = scale;
  }
}

void quantize_tokens(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const Tensor& y = args.out(Op::kY);
  const std::array<int64_t, 2> all = {0, x.shape[0]};
  std::span<const int64_t> offsets = all;
  if (args.inputs.size() > Op::kOffsets) offsets = args.in(Op::kOffsets).span<int64_t>();
  const std::vector<TokenRun> runs = find_runs(op, offsets);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
#pragma omp parallel for schedule(static)
    for (int64_t column = 0; column < x.shape[1]; ++column)
      quantize_column<T>(runs, x, column, y.as<E4m3>() + column * y.shape[1],
                         args.out(Op::kScales));
  });
}

}  // namespace

void add_quantize_tokens_cpu(KernelTable& table) {
  add_kernel<Op>(table, quantize_tokens, {.takes = takes_e4m3_codes});
}

}  // namespace tessera
