#include "ops/expert_activation/expert_activation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/dequantize/quantized_giver_testing.h"
#include "ops/dequantize/scaled_reader_testing.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::Role;
using testing::TestInput;

/// Clamped ones with limits that many inputs are above.
constexpr ActivationFunction kFunctions[] = {
    Activation::kSwiGLU,
    Activation::kGeGLU,
    Activation::kGeGLUTanh,
    Activation::kGelu,
    Activation::kGeluTanh,
    {Activation::kSwiGLUOai, 0.75},
    {Activation::kSwiGLUClamped, 1.25},
    Activation::kRelu2,
};

double plain_function(const ActivationFunction& function, double x) {
  const double below = std::min(x, static_cast<double>(function.limit));
  switch (function.kind) {
    case Activation::kSwiGLU:
      return x / (1 + std::exp(-x));
    case Activation::kGeGLU:
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeGLUTanh:
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSwiGLUOai:
      return below / (1 + std::exp(-1.702 * below));
    case Activation::kSwiGLUClamped:
      return below / (1 + std::exp(-below));
    case Activation::kRelu2:
      return std::pow(std::max(x, 0.0), 2);
  }
  return std::nan("");
}

/// The other factor of a gated activation.
double plain_other(const ActivationFunction& function, double up) {
  if (!is_clamped(function.kind)) return up;
  const double limit = function.limit;
  return std::clamp(up, -limit, limit) + (function.kind == Activation::kSwiGLUOai ? 1 : 0);
}

/// A spec and the rows that each expert has.
struct Case {
  ExpertActivationSpec spec;
  std::vector<int64_t> rows_of;

  std::vector<int64_t> offsets() const {
    std::vector<int64_t> result{0};
    for (const int64_t rows : rows_of) result.push_back(result.back() + rows);
    return result;
  }
  int64_t num_rows() const { return offsets().back(); }
  int64_t act_width() const { return std::ranges::max(spec.expert_sizes); }
  int64_t pre_width() const { return (is_gated(spec.function.kind) ? 2 : 1) * act_width(); }

  std::vector<TestInput> inputs(DType dtype, Random& random) const {
    std::vector<TestInput> list;
    list.push_back(
        {testing::random_tensor(dtype, {num_rows(), pre_width()}, random), Role::kValue, "pre"});
    if (spec.apply_prob) {
      list.push_back(
          {testing::random_tensor(DType::kF32, {num_rows()}, random), Role::kValue, "probs_R"});
    }
    list.push_back(
        {testing::tensor_of_i64({std::ssize(rows_of) + 1}, offsets()), Role::kConstant, "offsets"});
    return list;
  }
};

Case make_case(const ActivationFunction& function, bool apply_prob, std::vector<int64_t> sizes,
               std::vector<int64_t> rows_of) {
  Case c;
  c.spec.function = function;
  c.spec.expert_sizes = std::move(sizes);
  c.spec.apply_prob = apply_prob;
  c.rows_of = std::move(rows_of);
  return c;
}

KernelTable kernels() {
  KernelTable table;
  add_expert_activation_cpu(table);
  return table;
}

/// Calls check(row, expert, columns of the expert) for every row.
template <typename Check>
void for_each_row(const Case& c, Check check) {
  const auto offsets = c.offsets();
  for (size_t e = 0; e < c.rows_of.size(); ++e) {
    for (int64_t row = offsets[e]; row < offsets[e + 1]; ++row) {
      check(static_cast<size_t>(row), static_cast<size_t>(c.spec.expert_sizes[e]));
    }
  }
}

void expect_forward_right(const Case& c, DType dtype) {
  Random random(c.rows_of.size(), 5);
  const auto inputs = c.inputs(dtype, random);
  const auto act = testing::to_doubles(
      testing::run_operator(*make_expert_activation(c.spec), kernels(), inputs)[0]);
  const auto pre = testing::to_doubles(inputs[0].tensor);
  const size_t pre_width = c.pre_width();
  const size_t act_width = c.act_width();
  const double tolerance = dtype == DType::kF32 ? 1e-6 : 4e-3;
  for_each_row(c, [&](size_t row, size_t size) {
    const double prob =
        c.spec.apply_prob ? static_cast<double>(inputs[1].tensor.get().as<float>()[row]) : 1.0;
    for (size_t f = 0; f < size; ++f) {
      double expected = prob * plain_function(c.spec.function, pre[row * pre_width + f]);
      if (is_gated(c.spec.function.kind))
        expected *= plain_other(c.spec.function, pre[row * pre_width + size + f]);
      ASSERT_NEAR(act[row * act_width + f], expected, tolerance * std::max(1.0, std::abs(expected)))
          << "row " << row << ", column " << f;
    }
  });
}

std::vector<Case> make_cases(const ActivationFunction& function, bool apply_prob) {
  std::vector<Case> cases;
  const auto add = [&](std::vector<int64_t> sizes, std::vector<int64_t> rows_of) {
    cases.push_back(make_case(function, apply_prob, std::move(sizes), std::move(rows_of)));
  };
  add({5}, {0});
  add({1}, {1});
  add({33, 33, 33}, {0, 19, 0});
  add({16, 7, 40, 1}, {3, 21, 0, 18});
  return cases;
}

TEST(ExpertActivation, AgreesWithThePlainRule) {
  for (const ActivationFunction& function : kFunctions) {
    for (const bool apply_prob : {false, true}) {
      for (const Case& c : make_cases(function, apply_prob)) {
        SCOPED_TRACE(make_expert_activation(c.spec)->attributes());
        expect_forward_right(c, DType::kF32);
        expect_forward_right(c, DType::kBF16);
      }
    }
  }
}

/// Inputs near a clamp's limit are halved: finite differences would step over it.
void keep_off_limits(const Tensor& pre, const ActivationFunction& function) {
  if (!is_clamped(function.kind)) return;
  for (float& x : pre.span<float>()) {
    if (std::abs(std::abs(x) - function.limit) < 0.1F) x /= 2;
  }
}

TEST(ExpertActivation, Gradients) {
  Random random(8, 8);
  for (const ActivationFunction& function : kFunctions) {
    for (const bool apply_prob : {false, true}) {
      const Case c = make_case(function, apply_prob, {21, 21}, {4, 3});
      SCOPED_TRACE(make_expert_activation(c.spec)->attributes());
      const auto inputs = c.inputs(DType::kF32, random);
      keep_off_limits(inputs[0].tensor, function);
      testing::check_gradients(make_expert_activation(c.spec), kernels(), inputs);
    }
  }
}

TEST(ExpertActivation, ComesWithItsGradientWhereAsked) {
  Random random(8, 9);
  for (const ActivationFunction& function : kFunctions) {
    for (const bool apply_prob : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const Case c = make_case(function, apply_prob, {21, 21}, {4, 3});
        const ExpertActivation forward(c.spec);
        SCOPED_TRACE(fmt::format("{} {}", forward.attributes(), dtype_name(dtype)));
        auto inputs = c.inputs(dtype, random);
        const auto act = testing::run_operator(forward, kernels(), inputs);
        inputs.insert(inputs.begin(),
                      {testing::random_tensor(dtype, {7, 21}, random), Role::kConstant, "grad"});
        const auto grads =
            testing::run_operator(ExpertActivationBackward(forward), kernels(), inputs);
        const auto all =
            testing::run_operator(ExpertActivationBackward(forward, true), kernels(), inputs);
        ASSERT_EQ(all.size(), grads.size() + 1);
        for (size_t i = 0; i < grads.size(); ++i)
          EXPECT_EQ(testing::to_doubles(all[i]), testing::to_doubles(grads[i]));
        EXPECT_EQ(testing::to_doubles(all.back()), testing::to_doubles(act[0]));
      }
    }
  }
}

/// With experts of different sizes the unused columns are undefined, so each used column is
/// compared with the same row alone, under an expert of just that size.
TEST(ExpertActivation, GradientsOfDifferentSizesAreThoseOfEachExpertAlone) {
  const Case c = make_case(Activation::kSwiGLU, true, {16, 5, 23}, {2, 3, 4});
  Random random(9, 9);
  const auto inputs = c.inputs(DType::kF32, random);
  std::vector<OwnedTensor> grads(1);
  grads[0] = testing::random_tensor(DType::kF32, {c.num_rows(), c.act_width()}, random);
  const auto together =
      testing::run_gradients(make_expert_activation(c.spec), kernels(), inputs, grads);
  const size_t pre_width = c.pre_width();
  for_each_row(c, [&](size_t row, size_t size) {
    const auto part = [&](const OwnedTensor& tensor, size_t width, size_t count) {
      const float* from = tensor.get().as<float>() + row * width;
      return std::vector<float>(from, from + count);
    };
    const auto all = [](const OwnedTensor& tensor) {
      const auto span = tensor.get().span<float>();
      return std::vector<float>(span.begin(), span.end());
    };
    const auto width = static_cast<int64_t>(size);
    std::vector<OwnedTensor> grad(1);
    grad[0] =
        testing::tensor_of({1, width}, part(grads[0], static_cast<size_t>(c.act_width()), size));
    const auto alone = testing::run_gradients(
        make_expert_activation({Activation::kSwiGLU, {width}, true}), kernels(),
        testing::list_inputs(
            TestInput{
                testing::tensor_of({1, 2 * width}, part(inputs[0].tensor, pre_width, 2 * size)),
                Role::kValue, "pre"},
            TestInput{testing::tensor_of({1}, part(inputs[1].tensor, 1, 1)), Role::kValue, "probs"},
            TestInput{testing::tensor_of_i64({2}, {0, 1}), Role::kConstant, "offsets"}),
        grad);
    EXPECT_EQ(part(together[0], pre_width, 2 * size), all(alone[0]));
    EXPECT_EQ(part(together[1], 1, 1), all(alone[1]));
  });
}

/// Also of experts of several sizes, whose unused columns are a part of the rows that are
/// quantized.
TEST(ExpertActivation, GradientsOfFp8AreThoseOfWhatItStandsFor) {
  Random random(8, 10);
  const Backend backend(kernels());
  for (const ActivationFunction& function : kFunctions) {
    for (const bool apply_prob : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const Case& c : make_cases(function, apply_prob)) {
          const auto inputs = c.inputs(dtype, random);
          const OwnedTensor grad =
              testing::random_tensor(dtype, {c.num_rows(), c.act_width()}, random);
          std::vector<Tensor> values{grad};
          for (const TestInput& input : inputs) values.push_back(input.tensor);
          for (const bool gives_act : {false, true}) {
            const ExpertActivationBackward plain(ExpertActivation(c.spec), gives_act);
            for (const QuantizeSpec& spec : testing::scaled_reader_specs())
              testing::expect_reads_scaled(plain, ExpertActivationBackward::kPre, values, spec,
                                           backend);
          }
        }
      }
    }
  }
}

TEST(ExpertActivation, WhatIsGivenAsFp8TooHasTheBitsOfQuantize) {
  Random random(8, 11);
  const Backend backend(kernels());
  for (const ActivationFunction& function : kFunctions) {
    for (const bool apply_prob : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const std::vector<int64_t>& rows : {std::vector<int64_t>{4, 0, 3}, {0}}) {
          const std::vector<int64_t> sizes(rows.size(), 256);
          const Case c = make_case(function, apply_prob, sizes, rows);
          const auto inputs = c.inputs(dtype, random);
          const OwnedTensor grad = testing::random_tensor(dtype, {c.num_rows(), 256}, random);
          std::vector<Tensor> values;
          for (const TestInput& input : inputs) values.push_back(input.tensor);
          const ExpertActivation forward(c.spec);
          testing::expect_gives_quantized(forward, ExpertActivation::kAct, values, c.num_rows(),
                                          backend);
          values.insert(values.begin(), grad);
          testing::expect_gives_quantized(ExpertActivationBackward(forward),
                                          ExpertActivationBackward::kGradPre, values, c.num_rows(),
                                          backend);
        }
      }
    }
  }
}

TEST(ExpertActivation, GivesNoOtherFp8) {
  const Quantize quantize({.scale = ScaleLayout::block(1, 128)});
  const ExpertActivation forward({.expert_sizes = {256, 256}});
  const OperatorPtr gives = forward.giving_quantized(ExpertActivation::kAct, quantize);
  ASSERT_NE(gives, nullptr);
  EXPECT_EQ(dynamic_cast<const GivesQuantized&>(*gives).giving_quantized(0, quantize), nullptr);
  EXPECT_EQ(ExpertActivation({.expert_sizes = {256, 128}}).giving_quantized(0, quantize), nullptr);
  EXPECT_EQ(ExpertActivation({.expert_sizes = {192}}).giving_quantized(0, quantize), nullptr);
  EXPECT_EQ(forward.giving_quantized(0, Quantize({})), nullptr);
  EXPECT_EQ(ExpertActivationBackward(forward, true).giving_quantized(0, quantize), nullptr);
  EXPECT_EQ(ExpertActivationBackward(forward).giving_quantized(1, quantize), nullptr);
}

TEST(ExpertActivation, RefusesFp8ThatItCannotRead) {
  const ExpertActivationBackward plain(ExpertActivation({.expert_sizes = {4, 4}}));
  EXPECT_EQ(plain.reading_scaled_rows(ExpertActivationBackward::kGrad), nullptr);
  const OperatorPtr op = plain.reading_scaled_rows(ExpertActivationBackward::kPre);
  const ValueType grad{.dtype = DType::kBF16, .shape = {9, 4}};
  const ValueType offsets{.dtype = DType::kI64, .shape = {3}};
  ValueType pre{.dtype = DType::kE4M3, .shape = {9, 8}, .scale = ScaleLayout::row()};
  EXPECT_EQ(op->infer(std::vector{grad, pre, offsets})[0].to_string(), "bf16 [9, 8]");
  EXPECT_THROW(plain.infer(std::vector{grad, pre, offsets}), UserError);
  pre.scale = ScaleLayout::block(3, 4);
  EXPECT_THROW(op->infer(std::vector{grad, pre, offsets}), UserError);
  pre = {.dtype = DType::kE5M2, .shape = {9, 8}, .scale = ScaleLayout::row()};
  EXPECT_THROW(op->infer(std::vector{grad, pre, offsets}), UserError);
  pre = {.dtype = DType::kBF16, .shape = {9, 8}};
  EXPECT_THROW(op->infer(std::vector{grad, pre, offsets}), UserError);
}

TEST(ExpertActivation, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_expert_activation({Activation::kGelu, {}, false}), UserError);
  EXPECT_THROW(make_expert_activation({Activation::kGelu, {4, 0}, false}), UserError);
  const auto op = make_expert_activation({Activation::kSwiGLU, {4, 6}, true});
  const ValueType pre{.dtype = DType::kF32, .shape = {9, 12}};
  const ValueType probs{.dtype = DType::kF32, .shape = {9}};
  const ValueType offsets{.dtype = DType::kI64, .shape = {3}};
  const auto infer = [&](std::vector<ValueType> types) { return op->infer(types); };
  EXPECT_EQ(infer({pre, probs, offsets})[0].shape, (Shape{9, 6}));
  EXPECT_THROW(infer({pre, offsets}), UserError);
  EXPECT_THROW(infer({with_last_dim(pre, 6), probs, offsets}), UserError);
  EXPECT_THROW(infer({pre, with_last_dim(probs, 8), offsets}), UserError);
  EXPECT_THROW(infer({pre, probs, with_last_dim(offsets, 4)}), UserError);
}

TEST(ExpertActivation, CatchesOffsetsThatDoNotEndAtTheLastRow) {
  const Case c = make_case(Activation::kGelu, false, {4}, {3});
  Random random(1, 1);
  auto inputs = c.inputs(DType::kF32, random);
  inputs[1].tensor.get().as<int64_t>()[1] = 4;
  EXPECT_THROW(testing::run_operator(*make_expert_activation(c.spec), kernels(), inputs),
               InternalError);
}

}  // namespace
}  // namespace tessera
