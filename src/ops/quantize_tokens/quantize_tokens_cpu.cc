#include <algorithm>
#include <array>
#include <cmath>

#include "core/fp8.h"
#include "ops/permute/row_maps.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/round_values/round_math.h"
#include "ops/scaled_rows.h"
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

/// What x holds, by row and column.
template <typename T>
class PlainValues {
 public:
  explicit PlainValues(const Tensor& x) : x_(x.as<T>()), num_columns_(x.shape[1]) {}
  float operator()(int64_t row, int64_t column) const {
    return static_cast<float>(x_[row * num_columns_ + column]);
  }

 private:
  const T* x_;
  int64_t num_columns_;
};

template <typename Element>
class CodedValues {
 public:
  explicit CodedValues(const Tensor& x)
      : x_(x.as<Element>()),
        scales_(row_scales_of(x).as<float>()),
        num_columns_(x.shape[1]),
        columns_of_scale_(columns_of_scale(x.scale, num_columns_)),
        scales_of_row_((num_columns_ + columns_of_scale_ - 1) / columns_of_scale_) {}
  float operator()(int64_t row, int64_t column) const {
    return static_cast<float>(x_[row * num_columns_ + column]) *
           scales_[row * scales_of_row_ + column / columns_of_scale_];
  }

 private:
  const Element* x_;
  const float* scales_;
  int64_t num_columns_;
  int64_t columns_of_scale_;
  int64_t scales_of_row_;
};

/// Rows that are gathered.
template <typename Values>
class GatheredValues {
 public:
  GatheredValues(const Values& values, const Tensor& source, const Tensor& row_of)
      : values_(values), source_(source.as<int32_t>()), top_k_(top_k_of(row_of.shape)) {}
  float operator()(int64_t row, int64_t column) const {
    return source_[row] < 0 ? 0.0F : values_(source_[row] / top_k_, column);
  }

 private:
  const Values& values_;
  const int32_t* source_;
  int64_t top_k_;
};

/// Of x without rows, which may lack scales too.
struct NoValues {
  float operator()(int64_t /*row*/, int64_t /*column*/) const { return 0; }
};

/// One column of x, which is a row of y.
template <typename Values>
void quantize_column(std::span<const TokenRun> runs, const Values& values, int64_t column, E4m3* y,
                     const Tensor& scales) {
  for (const TokenRun& run : runs) {
    float amax = 0;
    for (int64_t i = 0; i < run.num_rows; ++i)
      amax = std::fmax(amax, std::fabs(values(run.first_row + i, column)));
    const float scale = scale_of_block<E4m3>(amax, /*unit=*/1, /*nested=*/false);
    const float factor = 1 / scale;
    E4m3* const to = y + run.to_column;
    for (int64_t i = 0; i < run.num_rows; ++i)
      to[i] = E4m3(values(run.first_row + i, column) * factor);
    std::fill(to + run.num_rows, to + token_blocks_of(run.num_rows) * kTokenBlock, E4m3(0.0F));
    scales.as<float>()[run.scale_row * scales.shape[1] + column] = scale;
  }
}

void quantize_tokens(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const Tensor& y = args.out(Op::kY);
  const std::array<int64_t, 2> all = {0, x.shape[0]};
  std::span<const int64_t> offsets = all;
  if (args.inputs.size() > Op::kOffsets) offsets = args.in(Op::kOffsets).span<int64_t>();
  const std::vector<TokenRun> runs = find_runs(op, offsets);
  const auto quantize_all = [&](const auto& values) {
#pragma omp parallel for schedule(static)
    for (int64_t column = 0; column < x.shape[1]; ++column)
      quantize_column(runs, values, column, y.as<E4m3>() + column * y.shape[1],
                      args.out(Op::kScales));
  };
  const auto quantize = [&](const auto& values) {
    if (!op.gather()) return quantize_all(values);
    quantize_all(GatheredValues(values, args.in(Op::kSource), args.in(Op::kRowOf)));
  };
  if (x.num_elements() == 0) return quantize(NoValues());
  if (x.scale.is_scaled())
    return x.dtype == DType::kE4M3 ? quantize(CodedValues<E4m3>(x))
                                   : quantize(CodedValues<E5m2>(x));
  with_storage(x.dtype, [&](auto storage) { quantize(PlainValues<decltype(storage)>(x)); });
}

}  // namespace

void add_quantize_tokens_cpu(KernelTable& table) {
  add_kernel<Op>(table, quantize_tokens, {.takes = takes_tokens});
}

}  // namespace tessera
