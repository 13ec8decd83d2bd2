#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/vocab_lse.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::Role;
using testing::TestInput;

// A bias is what another column of the weight is, by which every token has a 1.

struct Case {
  int64_t T, H, V;
  CrossEntropySpec spec;
  DType dtype = DType::kF32;
};

KernelTable kernels() {
  KernelTable table;
  add_linear_cross_entropy_cpu(table);
  return table;
}

CrossEntropySpec cut(std::optional<CrossEntropyParts> parts, float softcap = 0,
                     bool weighted = false) {
  return {.chunk_tokens = 16,
          .block_vocab = 32,
          .parts = parts,
          .softcap = softcap,
          .weighted = weighted,
          .biased = true};
}

std::vector<Case> cases() {
  const CrossEntropyParts parts{16, 32, 3};
  std::vector<Case> all;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    all.push_back({1, 1, 1, cut(std::nullopt), dtype});
    all.push_back({40, 24, 100, cut(std::nullopt), dtype});
    all.push_back({33, 31, 257, cut(parts), dtype});
    all.push_back({40, 24, 100, cut(std::nullopt, 5), dtype});
    all.push_back({40, 24, 100, cut(parts, 5, true), dtype});
  }
  return all;
}

/// x, weight and labels; x and weight with another column for a bias.
struct Operands {
  OwnedTensor x, weight, labels, bias, wide_x, wide_weight;
};

/// Rows with one more element behind each.
OwnedTensor widened_rows(const Tensor& rows, const std::function<float(int64_t)>& last) {
  const auto values = testing::to_doubles(rows);
  const int64_t width = rows.shape[1];
  std::vector<float> wide;
  for (int64_t row = 0; row < rows.shape[0]; ++row) {
    for (int64_t i = 0; i < width; ++i) wide.push_back(static_cast<float>(values[row * width + i]));
    wide.push_back(last(row));
  }
  return testing::tensor_of({rows.shape[0], width + 1}, wide, rows.dtype);
}

/// `num_words` in the whole vocabulary. The bias is made of numbers that BF16 has.
Operands make_operands(const Case& c, int64_t num_words) {
  Random random(static_cast<uint64_t>(c.T), static_cast<uint64_t>(c.V));
  std::vector<int32_t> labels;
  for (int64_t t = 0; t < c.T; ++t) {
    const auto label = static_cast<int32_t>(random.next_below(static_cast<uint64_t>(num_words)));
    labels.push_back(random.next_below(4) == 0 ? kIgnoredLabel : label);
  }
  std::vector<float> bias;
  for (int64_t v = 0; v < c.V; ++v)
    bias.push_back(static_cast<float>(Bf16(static_cast<float>(random.next_normal()))));
  Operands made{.x = testing::random_tensor(c.dtype, {c.T, c.H}, random),
                .weight = testing::random_tensor(c.dtype, {c.V, c.H}, random, 0.7),
                .labels = testing::tensor_of_i32({c.T}, labels),
                .bias = testing::tensor_of({c.V}, bias)};
  made.wide_x = widened_rows(made.x, [](int64_t) { return 1.0F; });
  made.wide_weight = widened_rows(made.weight, [&](int64_t row) { return bias[row]; });
  return made;
}

TestInput copy_of(const Tensor& from, Role role, const char* name) {
  OwnedTensor to(from.dtype, from.shape);
  std::copy_n(static_cast<const std::byte*>(from.data), from.num_bytes(),
              static_cast<std::byte*>(to.get().data));
  return {std::move(to), role, name};
}

std::vector<TestInput> make_inputs(const Case& c, const Operands& all, bool wide) {
  auto inputs =
      testing::list_inputs(copy_of(wide ? all.wide_x : all.x, Role::kValue, "x"),
                           copy_of(wide ? all.wide_weight : all.weight, Role::kWeight, "weight"),
                           copy_of(all.labels, Role::kConstant, "labels"),
                           TestInput{testing::tensor_of({1}, {0.25F}), Role::kConstant, "scale"});
  if (c.spec.weighted) {
    Random random(4, 4);
    inputs.push_back(
        {testing::random_tensor(DType::kF32, {c.T}, random), Role::kConstant, "token_weights"});
  }
  if (!wide) inputs.push_back(copy_of(all.bias, Role::kWeight, "bias"));
  return inputs;
}

CrossEntropySpec unbiased(CrossEntropySpec spec) {
  spec.biased = false;
  return spec;
}

/// The gradient of a weight with another column: without it, and of it.
void expect_weight_gradients(const Case& c, const Tensor& weight, const Tensor& bias,
                             const Tensor& wide) {
  const auto values = testing::to_doubles(wide);
  std::vector<float> columns;
  std::vector<float> last;
  for (int64_t v = 0; v < c.V; ++v) {
    for (int64_t h = 0; h < c.H; ++h)
      columns.push_back(static_cast<float>(values[v * (c.H + 1) + h]));
    last.push_back(static_cast<float>(values[v * (c.H + 1) + c.H]));
  }
  const double tolerance = c.dtype == DType::kF32 ? 2e-5 : 6e-3;
  if (c.V > 1)
    testing::expect_rows_near(weight, testing::tensor_of({c.V, c.H}, columns), tolerance,
                              "dweight");
  if (c.V > 1) testing::expect_rows_near(bias, testing::tensor_of({c.V}, last), tolerance, "dbias");
}

void expect_near(const Tensor& actual, const Tensor& expected, const char* what) {
  const auto a = testing::to_doubles(actual);
  const auto b = testing::to_doubles(expected);
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_NEAR(a[i], b[i], 5e-6 * (1 + std::abs(b[i]))) << what;
}

TEST(HeadBias, IsAColumnOfOnes) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(
        fmt::format("T {} V {} {} softcap {}", c.T, c.V, dtype_name(c.dtype), c.spec.softcap));
    const Operands all = make_operands(c, c.V);
    const auto inputs = make_inputs(c, all, false);
    const auto wide_inputs = make_inputs(c, all, true);
    const auto found =
        testing::run_operator(*make_linear_cross_entropy_fused(c.spec), kernels(), inputs);
    const auto expected = testing::run_operator(*make_linear_cross_entropy_fused(unbiased(c.spec)),
                                                kernels(), wide_inputs);
    expect_near(found[0], expected[0], "loss");
    expect_near(found[1], expected[1], "token_loss");
    expect_weight_gradients(c, found[3], found[4], expected[3]);

    const auto pair = testing::run_operator(*make_linear_cross_entropy(c.spec), kernels(), inputs);
    testing::expect_bitwise_equal(pair[0], found[0], "loss of the plain operator");
    std::vector<OwnedTensor> given(3);
    given[0] = testing::tensor_of({1}, {1.0F});
    const auto grads =
        testing::run_gradients(make_linear_cross_entropy(c.spec), kernels(), inputs, given);
    const double tolerance = c.dtype == DType::kF32 ? 5e-6 : 4e-3;
    testing::expect_rows_near(found[2], grads[0], tolerance, "dx");
    testing::expect_rows_near(found[4], grads.back(), tolerance, "dbias of the plain operator");
  }
}

TEST(HeadBias, FiniteDifferences) {
  for (const bool weighted : {false, true}) {
    const Case c{9, 4, 40, cut(std::nullopt, weighted ? 2.0F : 0.0F, weighted)};
    testing::check_gradients(make_linear_cross_entropy(c.spec), kernels(),
                             make_inputs(c, make_operands(c, c.V), false), {.outputs = {0}});
  }
}

TEST(HeadBias, OfAPartOfTheVocabulary) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t rows : {0, 33, 257}) {
      const Case c{20, 8, rows, cut(std::nullopt, rows == 33 ? 4.0F : 0.0F), dtype};
      SCOPED_TRACE(fmt::format("{} rows {}", rows, dtype_name(dtype)));
      const Operands all = make_operands(c, 1000);
      const auto inputs_of = [&](bool wide) {
        auto inputs = make_inputs(c, all, wide);
        inputs.erase(inputs.begin() + 3);
        return inputs;
      };
      const auto spec_of = [&](bool biased) {
        VocabLseSpec spec{.first_row = 100, .vocab_size = 1000, .cut = c.spec};
        spec.cut.biased = biased;
        return spec;
      };
      const auto found =
          testing::run_operator(VocabLse(spec_of(true)), kernels(), inputs_of(false));
      const auto expected =
          testing::run_operator(VocabLse(spec_of(false)), kernels(), inputs_of(true));
      if (rows > 0) expect_near(found[0], expected[0], "lse");
      expect_near(found[1], expected[1], "label_logit");
      const auto gradients = [&](bool biased) {
        Random random(8, 8);
        std::vector<OwnedTensor> given;
        for (int i = 0; i < 2; ++i)
          given.push_back(testing::random_tensor(DType::kF32, {c.T}, random));
        return testing::run_gradients(make_vocab_lse(spec_of(biased)), kernels(),
                                      inputs_of(!biased), given);
      };
      const auto own = gradients(true);
      expect_weight_gradients(c, own[1], own[3], gradients(false)[1]);
      if (rows == 33)
        testing::check_gradients(make_vocab_lse(spec_of(true)), kernels(), [&] {
          const Case plain{9, 4, 33, c.spec};
          auto inputs = make_inputs(plain, make_operands(plain, 1000), false);
          inputs.erase(inputs.begin() + 3);
          return inputs;
        }());
    }
  }
}

TEST(HeadBias, ShapeRule) {
  const ValueType x{DType::kBF16, {6, 4}};
  const ValueType weight{DType::kBF16, {10, 4}};
  const ValueType labels{DType::kI32, {6}};
  const ValueType scale{DType::kF32, {1}};
  const ValueType bias{DType::kF32, {10}};
  const OperatorPtr op = make_linear_cross_entropy_fused(cut(std::nullopt));
  EXPECT_EQ(op->infer(std::vector{x, weight, labels, scale, bias}).at(4), bias);
  EXPECT_TRUE(op->accumulates(4));
  const auto refuses = [](const Operator& of, const std::vector<ValueType>& wrong) {
    EXPECT_THROW(of.infer(wrong), UserError);
  };
  refuses(*op, {x, weight, labels, scale});
  refuses(*op, {x, weight, labels, scale, {DType::kF32, {9}}});
  refuses(*op, {x, weight, labels, scale, with_dtype(bias, DType::kBF16)});
  const OperatorPtr part =
      make_vocab_lse({.first_row = 0, .vocab_size = 10, .cut = cut(std::nullopt)});
  EXPECT_EQ(part->infer(std::vector{x, weight, labels, bias}).size(), 2U);
  refuses(*part, {x, weight, labels});
  refuses(*part, {x, weight, labels, {DType::kF32, {11}}});
}

}  // namespace
}  // namespace tessera
