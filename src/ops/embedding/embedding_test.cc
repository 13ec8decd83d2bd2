#include "ops/embedding/embedding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_embedding_cpu(table);
  return table;
}

std::vector<int32_t> random_tokens(int64_t count, int64_t vocab, Random& random) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<int32_t>(random.next_below(static_cast<uint64_t>(vocab))));
  }
  return tokens;
}

std::vector<TestInput> make_inputs(const std::vector<int32_t>& tokens, const Shape& table,
                                   DType dtype, Random& random) {
  std::vector<TestInput> inputs;
  inputs.push_back(
      {tensor_of_i32({static_cast<int64_t>(tokens.size())}, tokens), Role::kConstant, "tokens"});
  inputs.push_back({random_tensor(dtype, table, random), Role::kWeight, "table"});
  return inputs;
}

TEST(Embedding, CopiesRowsBitwise) {
  Random random(1, 1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t count : {0, 1, 7, 130}) {
      for (const int64_t hidden : {1, 5, 64, 131}) {
        const auto tokens = random_tokens(count, 11, random);
        const auto inputs = make_inputs(tokens, {11, hidden}, dtype, random);
        const auto outputs = run_operator(*make_embedding(), kernels(), inputs);
        const auto table = to_doubles(inputs[1].tensor);
        std::vector<float> expected;
        for (const int32_t token : tokens) {
          for (int64_t i = 0; i < hidden; ++i) {
            expected.push_back(static_cast<float>(table[token * hidden + i]));
          }
        }
        expect_bitwise_equal(outputs[0], tensor_of({count, hidden}, expected, dtype), "rows");
      }
    }
  }
}

/// Gradients are small integers, so that sums are exact in any order and every lost one shows.
TEST(Embedding, AccumulatesRepeatedTokens) {
  Random random(2, 1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t hidden : {1, 33, 200}) {
      const auto tokens = random_tokens(97, 5, random);
      const auto inputs = make_inputs(tokens, {6, hidden}, dtype, random);
      std::vector<float> grad;
      std::vector<float> expected(6 * hidden, 0.0F);
      for (const int32_t token : tokens) {
        for (int64_t i = 0; i < hidden; ++i) {
          grad.push_back(static_cast<float>(random.next_below(17)) - 8.0F);
          expected[token * hidden + i] += grad.back();
        }
      }
      std::vector<OwnedTensor> grad_outputs;
      grad_outputs.push_back(tensor_of({97, hidden}, grad, dtype));
      const auto grads = run_gradients(make_embedding(), kernels(), inputs, grad_outputs);
      expect_bitwise_equal(grads[1], tensor_of({6, hidden}, expected), "table gradient");
    }
  }
}

TEST(Embedding, ThePaddingTokenTakesNoGradient) {
  Random random(5, 1);
  const auto tokens = random_tokens(60, 4, random);
  const auto inputs = make_inputs(tokens, {4, 33}, DType::kF32, random);
  const auto gradient = [&](int64_t padding_token) {
    Random noise(6, 1);
    std::vector<OwnedTensor> grad_outputs;
    grad_outputs.push_back(random_tensor(DType::kF32, {60, 33}, noise));
    auto grads = run_gradients(make_embedding(padding_token), kernels(), inputs, grad_outputs);
    return to_doubles(grads[1]);
  };
  auto expected = gradient(-1);
  EXPECT_NE(expected[2 * 33], 0);
  std::fill_n(expected.begin() + 2 * 33, 33, 0.0);
  EXPECT_EQ(gradient(2), expected);
}

TEST(Embedding, GradientBitsDoNotDependOnThreads) {
  Random random(3, 1);
  const auto inputs = make_inputs(random_tokens(300, 4, random), {4, 200}, DType::kF32, random);
  std::vector<OwnedTensor> grad_outputs;
  grad_outputs.push_back(random_tensor(DType::kF32, {300, 200}, random));
  const int before = omp_get_max_threads();
  std::vector<OwnedTensor> results;
  for (const int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    auto grads = run_gradients(make_embedding(), kernels(), inputs, grad_outputs);
    results.push_back(std::move(grads[1]));
  }
  omp_set_num_threads(before);
  expect_bitwise_equal(results[1], results[0], "two threads");
  expect_bitwise_equal(results[2], results[0], "three threads");
}

TEST(Embedding, GradientAgainstFiniteDifferences) {
  Random random(4, 1);
  check_gradients(make_embedding(), kernels(),
                  make_inputs(random_tokens(9, 4, random), {4, 3}, DType::kF32, random));
}

TEST(Embedding, RefusesTokensOutsideTheVocabulary) {
  Random random(5, 1);
  for (const int32_t bad : {-1, 11, 2'000'000'000}) {
    const auto inputs = make_inputs({3, 10, bad, -5}, {11, 4}, DType::kF32, random);
    EXPECT_THAT([&] { run_operator(*make_embedding(), kernels(), inputs); },
                ::testing::ThrowsMessage<UserError>(::testing::AllOf(
                    ::testing::HasSubstr(fmt::format("token id {} at position 2", bad)),
                    ::testing::HasSubstr("vocabulary of 11"))));
  }
}

/// Rows [first, first + count) of the table of `inputs`, with the same tokens.
std::vector<TestInput> take_rows(const std::vector<TestInput>& inputs, int64_t first,
                                 int64_t count) {
  const Tensor& tokens = inputs[0].tensor;
  const Tensor& table = inputs[1].tensor;
  const int64_t width = table.shape[1];
  const auto all = to_doubles(table);
  const std::vector<float> rows(all.begin() + first * width, all.begin() + (first + count) * width);
  const auto ids = tokens.span<int32_t>();
  return list_inputs(
      TestInput{tensor_of_i32(tokens.shape, {ids.begin(), ids.end()}), Role::kConstant, "tokens"},
      TestInput{tensor_of({count, width}, rows, table.dtype), Role::kWeight, "table"});
}

/// The parts of a table together give its rows and its gradient, the padding token's included.
TEST(Embedding, PartsOfATableAddUpToTheWhole) {
  Random random(7, 1);
  constexpr int64_t kVocab = 13;
  constexpr int64_t kTokens = 50;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs =
        make_inputs(random_tokens(kTokens, kVocab, random), {kVocab, 33}, dtype, random);
    const auto whole = to_doubles(run_operator(*make_embedding(4), kernels(), inputs)[0]);
    std::vector<OwnedTensor> grad_outputs;
    grad_outputs.push_back(random_tensor(dtype, {kTokens, 33}, random));
    const auto grad =
        to_doubles(run_gradients(make_embedding(4), kernels(), inputs, grad_outputs)[1]);
    std::vector<double> sum(whole.size(), 0.0);
    std::vector<double> joined;
    for (const auto& [first, count] : {std::pair{0, 5}, {5, 0}, {5, 7}, {12, 1}, {13, 0}}) {
      const OperatorPtr op =
          make_embedding({.padding_token = 4, .first_row = first, .vocab_size = kVocab});
      const auto part = take_rows(inputs, first, count);
      const auto rows = to_doubles(run_operator(*op, kernels(), part)[0]);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += rows[i];
      const auto grads = to_doubles(run_gradients(op, kernels(), part, grad_outputs)[1]);
      joined.insert(joined.end(), grads.begin(), grads.end());
    }
    EXPECT_EQ(sum, whole);
    EXPECT_EQ(joined, grad);
  }
}

TEST(Embedding, APartRefusesTokensOutsideTheWholeVocabulary) {
  Random random(8, 1);
  const OperatorPtr op = make_embedding({.first_row = 4, .vocab_size = 11});
  const auto inputs = make_inputs({0, 10, 11}, {4, 3}, DType::kF32, random);
  EXPECT_THAT([&] { run_operator(*op, kernels(), inputs); },
              ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(
                  "token id 11 at position 2 is outside the vocabulary of 11")));
  EXPECT_EQ(op->attributes(), "first_row=4 vocab=11");
  EXPECT_THROW(make_embedding({.first_row = 5, .vocab_size = 4}), UserError);
  const ValueType too_long[] = {{DType::kI32, {3}}, {DType::kF32, {8, 3}}};
  EXPECT_THROW(op->infer(too_long), UserError);
}

TEST(Embedding, ShapeRuleAndCost) {
  const auto op = make_embedding();
  const ValueType tokens{DType::kI32, {8}, 0, 3};
  const ValueType table{DType::kBF16, {100, 16}};
  const ValueType types[] = {tokens, table};
  const auto outputs = op->infer(types);
  EXPECT_EQ(outputs[0], (ValueType{DType::kBF16, {8, 16}, 0, 3}));
  EXPECT_EQ(op->cost(types, outputs).bytes, 8 * 4 + 2 * 8 * 16 * 2);
  const auto refuses = [&](const ValueType& a, const ValueType& b, const char* message) {
    const ValueType wrong[] = {a, b};
    EXPECT_THAT([&] { op->infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses(with_dtype(tokens, DType::kI64), table, "embedding: tokens must be i32 [T]");
  refuses(tokens, with_dtype(table, DType::kI32), "embedding: table must be f32 or bf16");
  refuses(tokens, {DType::kF32, {4}}, "embedding: table must be");
}

}  // namespace
}  // namespace tessera::testing
