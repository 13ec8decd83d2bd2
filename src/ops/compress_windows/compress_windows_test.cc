#include "ops/compress_windows/compress_windows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

using Lengths = std::vector<int64_t>;

KernelTable kernels() {
  KernelTable table;
  add_compress_windows_cpu(table);
  return table;
}

std::vector<int32_t> positions_of(const Lengths& lengths) {
  std::vector<int32_t> positions;
  for (const int64_t length : lengths) {
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
  }
  return positions;
}

std::vector<TestInput> make_inputs(const CompressSpec& spec, const Lengths& lengths, int64_t size,
                                   DType dtype) {
  Random random(17, 1);
  const std::vector<int32_t> positions = positions_of(lengths);
  const int64_t tokens = std::ssize(positions);
  const int64_t width = spec.parts() * size;
  return list_inputs(
      TestInput{random_tensor(dtype, {tokens, width}, random), Role::kValue, "kv"},
      TestInput{random_tensor(dtype, {tokens, width}, random), Role::kValue, "gate"},
      TestInput{random_tensor(DType::kF32, {spec.rate, width}, random), Role::kWeight, "bias"},
      TestInput{tensor_of_i32({tokens}, positions), Role::kConstant, "positions"});
}

/// The definition, window after window, in doubles.
struct ReferenceCompression {
  CompressSpec spec;
  int64_t size;
  std::vector<double> kv, gate, bias;

  /// Adds the terms of a run of tokens, of which `part` is taken.
  void add_terms(int64_t first, int64_t part, int64_t c, double& weights, double& values) const {
    const int64_t width = spec.parts() * size;
    for (int64_t j = 0; j < spec.rate; ++j) {
      const int64_t at = part * size + c;
      const double weight = std::exp(gate[(first + j) * width + at] + bias[j * width + at]);
      weights += weight;
      values += weight * kv[(first + j) * width + at];
    }
  }

  std::vector<float> entry(int64_t begin, int64_t window) const {
    std::vector<float> result;
    for (int64_t c = 0; c < size; ++c) {
      double weights = 0;
      double values = 0;
      const int64_t first = begin + window * spec.rate;
      if (spec.overlaps && window > 0) add_terms(first - spec.rate, 0, c, weights, values);
      add_terms(first, spec.parts() - 1, c, weights, values);
      result.push_back(static_cast<float>(values / weights));
    }
    return result;
  }
};

const std::vector<Lengths> kLengths = {{},  {1},          {4},         {3, 2},         {9},
                                       {8}, {5, 0, 4, 1}, {1, 13, 12}, {3, 3, 3, 3, 8}};
const CompressSpec kSpecs[] = {{.rate = 4},
                               {.rate = 4, .overlaps = true},
                               {.rate = 1},
                               {.rate = 1, .overlaps = true},
                               {.rate = 3, .overlaps = true}};

void expect_definition(const CompressSpec& spec, const Lengths& lengths, int64_t size,
                       DType dtype) {
  SCOPED_TRACE(
      fmt::format("rate {} of {} sequences, {} elements", spec.rate, lengths.size(), size));
  const auto inputs = make_inputs(spec, lengths, size, dtype);
  const ReferenceCompression exact{spec, size, to_doubles(inputs[0].tensor),
                                   to_doubles(inputs[1].tensor), to_doubles(inputs[2].tensor)};
  const int64_t tokens = std::ssize(positions_of(lengths));
  const int64_t rows = num_entry_rows(tokens, spec.rate);
  std::vector<float> expected(rows * size);
  std::vector<int32_t> expected_positions(rows);
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    for (int64_t window = 0; window < length / spec.rate; ++window) {
      const int64_t row = begin / spec.rate + window;
      std::ranges::copy(exact.entry(begin, window), expected.begin() + row * size);
      expected_positions[row] = static_cast<int32_t>(window * spec.rate);
    }
    begin += length;
  }
  const auto outputs = run_operator(CompressWindows(spec), kernels(), inputs);
  expect_rows_near(outputs[0], tensor_of({rows, size}, expected),
                   dtype == DType::kF32 ? 2e-6 : 6e-3, "entries");
  expect_bitwise_equal(outputs[1], tensor_of_i32({rows}, expected_positions), "positions");
}

TEST(CompressWindows, SumsTokensOfWindows) {
  for (const CompressSpec& spec : kSpecs) {
    for (const Lengths& lengths : kLengths) {
      for (const DType dtype : {DType::kF32, DType::kBF16})
        expect_definition(spec, lengths, 5, dtype);
    }
    expect_definition(spec, {6, 11}, 131, DType::kF32);
  }
}

TEST(CompressWindows, GradientsMatchFiniteDifferences) {
  for (const CompressSpec& spec : kSpecs) {
    for (const Lengths& lengths : kLengths) {
      check_gradients(make_compress_windows(spec), kernels(),
                      make_inputs(spec, lengths, 3, DType::kF32), {.outputs = {0}});
    }
  }
}

OwnedTensor rows_of(const Tensor& tensor, int64_t first, int64_t count) {
  OwnedTensor part(tensor.dtype, {count, tensor.shape[1]});
  const int64_t bytes = tensor.shape[1] * dtype_size(tensor.dtype);
  if (count > 0)
    std::memcpy(part.get().data, static_cast<const std::byte*>(tensor.data) + first * bytes,
                count * bytes);
  return part;
}

OwnedTensor copied(const Tensor& tensor) {
  return rows_of(tensor, 0, tensor.shape[0]);
}

/// A sequence has the same bits by itself and among others, forward and backward.
TEST(CompressWindows, SequencesDoNotMix) {
  const CompressSpec spec{.rate = 3, .overlaps = true};
  const Lengths lengths = {7, 2, 6, 10};
  const auto packed = make_inputs(spec, lengths, 4, DType::kF32);
  const auto op = make_compress_windows(spec);
  Random random(3, 9);
  const auto entries = run_operator(*op, kernels(), packed);
  std::vector<OwnedTensor> grad_outputs;
  grad_outputs.push_back(random_tensor(DType::kF32, entries[0].get().shape, random));
  grad_outputs.emplace_back();
  const auto grads = run_gradients(op, kernels(), packed, grad_outputs);
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    std::vector<TestInput> own;
    for (const int idx : {0, 1})
      own.push_back({rows_of(packed[idx].tensor, begin, length), Role::kValue, packed[idx].name});
    own.push_back({copied(packed[2].tensor), Role::kWeight, "bias"});
    own.push_back({tensor_of_i32({length}, positions_of({length})), Role::kConstant, "positions"});
    const auto alone = run_operator(*op, kernels(), own);
    const int64_t count = num_entry_rows(length, spec.rate);
    const int64_t row = begin / spec.rate;
    if (length >= spec.rate)
      expect_bitwise_equal(alone[0], rows_of(entries[0], row, count), "entries");
    std::vector<OwnedTensor> own_grads;
    own_grads.push_back(rows_of(grad_outputs[0], row, count));
    own_grads.emplace_back();
    const auto alone_grads = run_gradients(op, kernels(), own, own_grads);
    for (const int idx : {0, 1})
      expect_bitwise_equal(alone_grads[idx], rows_of(grads[idx], begin, length), "gradient");
    begin += length;
  }
}

TEST(CompressWindows, SameBitsForAnyNumberOfThreads) {
  const int before = omp_get_max_threads();
  const CompressSpec spec{.rate = 4, .overlaps = true};
  const auto inputs = make_inputs(spec, {50, 3, 27}, 150, DType::kBF16);
  const auto run = [&] {
    auto outputs = run_operator(CompressWindows(spec), kernels(), inputs);
    std::vector<OwnedTensor> grad_outputs;
    grad_outputs.push_back(copied(outputs[0]));
    grad_outputs.emplace_back();
    for (OwnedTensor& grad :
         run_gradients(make_compress_windows(spec), kernels(), inputs, grad_outputs))
      outputs.push_back(std::move(grad));
    return outputs;
  };
  omp_set_num_threads(1);
  const auto one = run();
  omp_set_num_threads(3);
  const auto three = run();
  omp_set_num_threads(before);
  for (size_t i = 0; i + 1 < one.size(); ++i)
    expect_bitwise_equal(three[i], one[i], fmt::format("result {}", i));
}

TEST(CompressWindows, ShapeRule) {
  const CompressWindows op({.rate = 4, .overlaps = true});
  const ValueType kv{DType::kBF16, {10, 6}};
  const ValueType bias{DType::kF32, {4, 6}};
  const ValueType positions{DType::kI32, {10}};
  const auto types = op.infer(std::vector{kv, kv, bias, positions});
  EXPECT_EQ(types[0], (ValueType{DType::kBF16, {2, 3}}));
  EXPECT_EQ(types[1], (ValueType{DType::kI32, {2}}));
  const auto refuses = [&](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { op.infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({kv, kv}, "takes kv, gate, bias and positions");
  refuses({{DType::kBF16, {10, 5}}, kv, bias, positions}, "is not of 2 equal parts");
  refuses({kv, {DType::kBF16, {9, 6}}, bias, positions}, "the gate is");
  refuses({kv, kv, {DType::kF32, {3, 6}}, positions}, "the bias is");
  refuses({kv, kv, bias, {DType::kI32, {9}}}, "positions are");
  EXPECT_THROW(CompressWindows({.rate = 0}), UserError);
}

TEST(CompressWindows, RefusesPositionsBeforeTheTokens) {
  auto inputs = make_inputs({.rate = 2}, {4}, 3, DType::kF32);
  inputs[3].tensor.get().as<int32_t>()[1] = 2;
  EXPECT_THAT([&] { run_operator(CompressWindows({.rate = 2}), kernels(), inputs); },
              ::testing::ThrowsMessage<UserError>(::testing::HasSubstr("token 1 has position 2")));
}

}  // namespace
}  // namespace tessera::testing
