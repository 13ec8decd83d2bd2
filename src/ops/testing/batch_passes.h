#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "ops/testing/gpu_kernel.h"
#include "ops/testing/op_test.h"

/// Sequences that are given to an operator of ops/batch_rows.h in pieces, some of them in a pass.
namespace tessera::testing {

struct BatchCase {
  std::vector<int64_t> lengths;  ///< of the sequences, whose rows follow one another
  std::vector<Tensor> rows;      ///< inputs of a row for each token [T, ...], on the host
  std::vector<Tensor> fixed;     ///< and inputs of all passes, which stand behind them
  std::vector<Tensor> last;      ///< and those that stand behind bounds, lengths and slots
  ValueType state;               ///< of all slots, one more than there are sequences

  int64_t num_sequences() const { return std::ssize(lengths); }
  int64_t num_slots() const { return num_sequences() + 1; }
};

/// Where packed sequences of these lengths begin, and the end.
inline std::vector<int32_t> bounds_of(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> bounds = {0};
  for (const int64_t length : lengths)
    bounds.push_back(bounds.back() + static_cast<int32_t>(length));
  return bounds;
}

/// A pass: some next tokens of some of the sequences, in any order, and rows behind them.
struct BatchPass {
  std::vector<int64_t> tokens;  ///< of the packed sequences
  std::vector<int32_t> bounds = {0};
  std::vector<int32_t> lengths;
  std::vector<int32_t> slots;
};

inline std::vector<BatchPass> draw_passes(const BatchCase& c, uint64_t seed) {
  Random random(seed, 0);
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  std::vector<int64_t> done(c.lengths.size());
  std::vector<BatchPass> passes;
  bool is_done = false;
  while (!is_done) {
    BatchPass pass;
    is_done = true;
    const int64_t first = below(c.num_sequences());
    int64_t begin = 0;
    std::vector<int64_t> begins;
    for (const int64_t length : c.lengths) {
      begins.push_back(begin);
      begin += length;
    }
    for (int64_t i = 0; i < c.num_sequences(); ++i) {
      const int64_t s = (first + i) % c.num_sequences();
      const int64_t left = c.lengths[s] - done[s];
      const int64_t count = std::min(left, below(3) == 0 ? 0 : 1 + below(1 + left));
      for (int64_t t = 0; t < count; ++t) pass.tokens.push_back(begins[s] + done[s] + t);
      done[s] += count;
      is_done = is_done && done[s] == c.lengths[s];
      pass.bounds.push_back(static_cast<int32_t>(pass.tokens.size()));
      pass.lengths.push_back(static_cast<int32_t>(count == 0 ? 0 : done[s]));
      pass.slots.push_back(static_cast<int32_t>(count == 0 ? 0 : c.num_sequences() - s));
    }
    passes.push_back(std::move(pass));
  }
  return passes;
}

/// The rows of a pass, and behind them some of NaN.
inline OwnedTensor gather_rows(const Tensor& all, const std::vector<int64_t>& tokens) {
  constexpr int64_t kRest = 3;
  Shape shape = all.shape;
  const int64_t row = all.num_bytes() / std::max<int64_t>(shape[0], 1);
  shape[0] = std::ssize(tokens) + kRest;
  OwnedTensor result(all.dtype, shape, "rows");
  std::memset(result.get().data, 0xFF, static_cast<size_t>(result.get().num_bytes()));
  auto* to = static_cast<std::byte*>(result.get().data);
  for (const int64_t token : tokens) {
    std::memcpy(to, static_cast<const std::byte*>(all.data) + token * row,
                static_cast<size_t>(row));
    to += row;
  }
  return result;
}

/// The first output's rows of all tokens, after passes of this seed.
inline std::vector<double> run_in_passes(const Operator& op, const Backend& backend,
                                         const BatchCase& c, uint64_t seed) {
  const Tensor& like = c.rows.front();
  OwnedTensor nothing(c.state.dtype, c.state.shape, "states");
  std::memset(nothing.get().data, 0xFF, static_cast<size_t>(nothing.get().num_bytes()));
  const OwnedTensor states = copy_to(backend, nothing);
  std::vector<std::vector<double>> by_token(like.shape[0]);
  for (const BatchPass& pass : draw_passes(c, seed)) {
    std::vector<OwnedTensor> owned;
    std::vector<ValueType> types;
    for (const Tensor& rows : c.rows)
      owned.push_back(copy_to(backend, gather_rows(rows, pass.tokens)));
    for (const Tensor& fixed : c.fixed) owned.push_back(copy_to(backend, fixed));
    const auto give = [&](const std::vector<int32_t>& values) {
      owned.push_back(copy_to(backend, tensor_of_i32({std::ssize(values)}, values)));
    };
    give(pass.bounds);
    give(pass.lengths);
    give(pass.slots);
    for (const Tensor& last : c.last) owned.push_back(copy_to(backend, last));
    std::vector<Tensor> in(owned.begin(), owned.end());
    for (const Tensor& input : in) types.push_back({input.dtype, input.shape});
    const ValueType type = op.infer(types).front();
    const OwnedTensor out(type.dtype, type.shape, "out", backend.device());
    run_kernel(op, backend, in, std::vector<Tensor>{out, states});
    const std::vector<double> values = to_doubles(copy_to_host(backend, out));
    const auto width = static_cast<int64_t>(values.size()) / type.shape[0];
    const auto row = [&](int64_t r) { return values.begin() + r * width; };
    const auto num_given = std::ssize(pass.tokens);
    for (int64_t r = 0; r < num_given; ++r) by_token[pass.tokens[r]].assign(row(r), row(r) + width);
    EXPECT_TRUE(std::all_of(row(num_given), values.end(), [](double x) { return x == 0; }))
        << "rows behind the sequences";
  }
  std::vector<double> all;
  for (const auto& values : by_token) all.insert(all.end(), values.begin(), values.end());
  return all;
}

/// What all operators of ops/batch_rows.h refuse of bounds, lengths and slots. Of two sequences
/// with 5 and 3 tokens and an operator of three slots.
inline void expect_refusals(const Operator& op, const Backend& backend, const BatchCase& c) {
  const auto run = [&](const std::vector<int32_t>& bounds, const std::vector<int32_t>& lengths,
                       const std::vector<int32_t>& slots) {
    const OwnedTensor given[] = {tensor_of_i32({std::ssize(bounds)}, bounds),
                                 tensor_of_i32({std::ssize(lengths)}, lengths),
                                 tensor_of_i32({std::ssize(slots)}, slots)};
    std::vector<Tensor> in = c.rows;
    in.insert(in.end(), c.fixed.begin(), c.fixed.end());
    in.insert(in.end(), std::begin(given), std::end(given));
    std::vector<ValueType> types;
    for (const Tensor& input : in) types.push_back({input.dtype, input.shape});
    const ValueType type = op.infer(types).front();
    const OwnedTensor out(type.dtype, type.shape, "out");
    const OwnedTensor states(c.state.dtype, c.state.shape, "states");
    run_kernel(op, backend, in, std::vector<Tensor>{out, states});
  };
  EXPECT_NO_THROW(run({0, 5, 8}, {5, 3}, {0, 2}));
  EXPECT_THROW(run({0, 5, 9}, {5, 4}, {0, 2}), UserError) << "more rows than there are";
  EXPECT_THROW(run({0, 5, 4}, {5, 4}, {0, 2}), UserError) << "falling bounds";
  EXPECT_THROW(run({0, 5, 8}, {4, 3}, {0, 2}), UserError) << "shorter than its new tokens";
  EXPECT_THROW(run({0, 5, 8}, {5, 3}, {0, 3}), UserError) << "no such slot";
  EXPECT_THROW(run({0, 5, 8}, {5, 3}, {-1, 0}), UserError);
}

}  // namespace tessera::testing
