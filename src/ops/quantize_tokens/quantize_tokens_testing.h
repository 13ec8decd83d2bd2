#pragma once

#include <numeric>
#include <vector>

#include "core/fp8.h"
#include "core/memory.h"
#include "ops/operator.h"
#include "ops/permute/row_maps.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/testing/op_test.h"

/// What QuantizeTokens makes, for tests.
namespace tessera::testing {

/// Where each of several parts ends, after 0.
inline std::vector<int64_t> ends_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> ends(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), ends.begin() + 1);
  return ends;
}

/// Codes and scales, which begin as bytes that stand for nothing.
struct TokenCodes {
  OwnedTensor codes;
  OwnedTensor scales;

  explicit TokenCodes(std::span<const ValueType> types)
      : codes(types[QuantizeTokens::kY].dtype, types[QuantizeTokens::kY].shape),
        scales(types[QuantizeTokens::kScales].dtype, types[QuantizeTokens::kScales].shape) {
    for (const Tensor& tensor : {codes.get(), scales.get()})
      std::fill_n(static_cast<uint8_t*>(tensor.data), tensor.num_bytes(), uint8_t{0xff});
  }

  /// What the code of a group's column stands for; `token` is a column of the codes.
  double value(TokenScales kind, int64_t group, int64_t token, int64_t column) const {
    const Tensor y = codes.get();
    const Tensor of = scales.get();
    const int64_t row = kind == TokenScales::kBlock ? token / 128 : group;
    return static_cast<double>(static_cast<float>(y.as<E4m3>()[column * y.shape[1] + token])) *
           of.as<float>()[row * of.shape[1] + column];
  }
};

/// By the CPU's kernel.
inline TokenCodes run_quantize_tokens(const QuantizeTokens& op, const std::vector<Tensor>& inputs) {
  std::vector<ValueType> types;
  for (const Tensor& input : inputs)
    types.push_back({.dtype = input.dtype, .shape = input.shape, .scale = input.scale});
  TokenCodes found(op.infer(types));
  KernelTable table;
  add_quantize_tokens_cpu(table);
  const std::vector<Tensor> outputs = {found.codes.get(), found.scales.get()};
  table.find(QuantizeTokens::kName)->second(op, {.inputs = inputs, .outputs = outputs});
  return found;
}

inline TokenCodes quantize_tokens(const Tensor& x, TokenScales scales,
                                  const std::vector<int64_t>& offsets) {
  const OwnedTensor ends = tensor_of_i64({std::ssize(offsets)}, offsets);
  return run_quantize_tokens(QuantizeTokens(scales), {x, ends.get()});
}

/// Maps of `num_rows` rows to some of 50 tokens with 3 choices, a few of them padding.
struct GatheredRows {
  static constexpr int64_t kTokens = 50;
  static constexpr int64_t kChoices = 3;

  OwnedTensor source;
  OwnedTensor row_of;

  GatheredRows(int64_t num_rows, Random& random)
      : source(DType::kI32, {num_rows}), row_of(DType::kI32, {kTokens, kChoices}) {
    for (int32_t& at : source.get().span<int32_t>())
      at = static_cast<int32_t>(random.next_below(kTokens * kChoices + 10)) - 10;
    for (int32_t& at : source.get().span<int32_t>()) at = std::max(at, -1);
    for (int32_t& at : row_of.get().span<int32_t>()) at = -1;  // is not read
  }

  /// What Permute makes of x.
  OwnedTensor rows_of(const Tensor& x) const {
    OwnedTensor rows(x.dtype, {source.get().shape[0], x.shape[1]});
    gather_rows(x, source, kChoices, rows);
    return rows;
  }
};

}  // namespace tessera::testing
