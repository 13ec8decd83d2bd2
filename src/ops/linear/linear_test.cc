#include "ops/linear/linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/addend_check.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_linear_cpu(table);
  return table;
}

struct Case {
  int64_t tokens, in, out;
  bool bias = false;
  DType dtype = DType::kF32;

  std::string to_string() const {
    return fmt::format("T {} in {} out {} bias {} {}", tokens, in, out, bias, dtype_name(dtype));
  }
};

std::vector<TestInput> make_inputs(const Case& c, Random& random) {
  std::vector<TestInput> inputs;
  inputs.push_back({random_tensor(c.dtype, {c.tokens, c.in}, random), Role::kValue, "x"});
  inputs.push_back({random_tensor(c.dtype, {c.out, c.in}, random), Role::kWeight, "weight"});
  if (c.bias)
    inputs.push_back({random_tensor(DType::kF32, {c.out}, random), Role::kWeight, "bias"});
  return inputs;
}

/// Plain loops in double: what y and the gradients should be.
struct Reference {
  std::vector<float> y, grad_x, grad_weight, grad_bias;

  Reference(const Case& c, const std::vector<TestInput>& inputs, const Tensor& grad) {
    const auto x = to_doubles(inputs[0].tensor);
    const auto w = to_doubles(inputs[1].tensor);
    const auto g = to_doubles(grad);
    const auto b = c.bias ? to_doubles(inputs[2].tensor) : std::vector<double>(c.out, 0.0);
    const auto at = [](int64_t row, int64_t col, int64_t cols) {
      return static_cast<size_t>(row * cols + col);
    };
    const auto dot = [](int64_t count, auto term) {
      double sum = 0;
      for (int64_t i = 0; i < count; ++i) sum += term(i);
      return sum;
    };
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t o = 0; o < c.out; ++o) {
        y.push_back(static_cast<float>(
            b[o] + dot(c.in, [&](int64_t i) { return x[at(t, i, c.in)] * w[at(o, i, c.in)]; })));
      }
      for (int64_t i = 0; i < c.in; ++i) {
        grad_x.push_back(static_cast<float>(
            dot(c.out, [&](int64_t o) { return g[at(t, o, c.out)] * w[at(o, i, c.in)]; })));
      }
    }
    for (int64_t o = 0; o < c.out; ++o) {
      for (int64_t i = 0; i < c.in; ++i) {
        grad_weight.push_back(static_cast<float>(
            dot(c.tokens, [&](int64_t t) { return g[at(t, o, c.out)] * x[at(t, i, c.in)]; })));
      }
      grad_bias.push_back(
          static_cast<float>(dot(c.tokens, [&](int64_t t) { return g[at(t, o, c.out)]; })));
    }
  }
};

void check_case(const Case& c) {
  SCOPED_TRACE(c.to_string());
  Random random(9, static_cast<uint64_t>(c.tokens * 1000 + c.in));
  const auto inputs = make_inputs(c, random);
  std::vector<OwnedTensor> grad;
  grad.push_back(random_tensor(c.dtype, {c.tokens, c.out}, random));
  const Reference expected(c, inputs, grad[0]);
  const double exact = 1e-5;
  const double rounded = c.dtype == DType::kF32 ? exact : 4e-3;
  const auto outputs = run_operator(*make_linear(c.bias), kernels(), inputs);
  expect_rows_near(outputs[0], tensor_of({c.tokens, c.out}, expected.y), rounded, "y");
  const auto grads = run_gradients(make_linear(c.bias), kernels(), inputs, grad);
  expect_rows_near(grads[0], tensor_of({c.tokens, c.in}, expected.grad_x), rounded, "grad x");
  expect_rows_near(grads[1], tensor_of({c.out, c.in}, expected.grad_weight), exact, "grad weight");
  if (c.bias)
    expect_rows_near(grads[2], tensor_of({c.out}, expected.grad_bias), exact, "grad bias");
}

TEST(Linear, MatchesAReferenceInAllShapes) {
  const int64_t shapes[][3] = {{0, 5, 3},    {1, 1, 1},    {7, 16, 33},
                               {33, 17, 64}, {600, 20, 9}, {1300, 40, 24}};
  for (const auto& [tokens, in, out] : shapes) {
    for (const bool bias : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        check_case({tokens, in, out, bias, dtype});
      }
    }
  }
}

TEST(Linear, GradientsAgainstFiniteDifferences) {
  for (const bool bias : {false, true}) {
    Random random(10, bias ? 1 : 0);
    check_gradients(make_linear(bias), kernels(), make_inputs({5, 7, 6, bias}, random));
  }
}

TEST(Linear, AddsAnAddendBeforeRounding) {
  const int64_t shapes[][3] = {{0, 5, 3},    {1, 1, 1},    {7, 16, 33},
                               {33, 17, 64}, {600, 20, 9}, {1300, 40, 24}};
  for (const auto& [tokens, in, out] : shapes) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Case c{tokens, in, out, false, dtype};
      SCOPED_TRACE(c.to_string());
      Random random(12, static_cast<uint64_t>(tokens));
      check_addend(*make_linear(), kernels(), make_inputs(c, random));
      check_addend(
          LinearDgrad(), kernels(),
          list_inputs(
              TestInput{random_tensor(dtype, {tokens, out}, random), Role::kConstant, "grad"},
              TestInput{random_tensor(dtype, {out, in}, random), Role::kConstant, "weight"}));
    }
  }
}

/// Halves of values and these values themselves give the same products, in F32.
TEST(Linear, MultipliesHalvesAsF32) {
  for (const auto& [tokens, in, out] :
       {std::tuple{0, 5, 3}, {1, 1, 1}, {7, 16, 33}, {70, 600, 9}}) {
    Random random(14, static_cast<uint64_t>(tokens));
    const auto check = [&](const Operator& op, const Shape& a, const Shape& b,
                           std::optional<Shape> extra) {
      SCOPED_TRACE(fmt::format("{} {} {}", op.name(), op.attributes(), a.to_string()));
      std::vector<TestInput> halves;
      std::vector<TestInput> values;
      for (const Shape& shape : {a, b}) {
        halves.push_back({random_tensor(DType::kF16, shape, random), Role::kConstant, "factor"});
        const std::vector<double> all = to_doubles(halves.back().tensor);
        values.push_back({tensor_of(shape, {all.begin(), all.end()}), Role::kConstant, "factor"});
      }
      if (extra) {
        const OwnedTensor added = random_tensor(DType::kF32, *extra, random);
        const auto all = added.get().span<float>();
        for (auto* const inputs : {&halves, &values})
          inputs->push_back(
              {tensor_of(*extra, {all.begin(), all.end()}), Role::kConstant, "extra"});
      }
      const auto found = run_operator(op, kernels(), halves);
      const auto expected = run_operator(op, kernels(), values);
      ASSERT_EQ(found[0].get().dtype, DType::kF32);
      expect_rows_near(found[0], expected[0], 1e-5, "product");
    };
    check(Linear(Linear::Extra::kNone), {tokens, in}, {out, in}, std::nullopt);
    check(Linear(Linear::Extra::kBias), {tokens, in}, {out, in}, Shape{out});
    check(Linear(Linear::Extra::kAddend), {tokens, in}, {out, in}, Shape{tokens, out});
    check(LinearDgrad(), {tokens, out}, {out, in}, std::nullopt);
    check(LinearDgrad(true), {tokens, out}, {out, in}, Shape{tokens, in});
    check(LinearWgrad(), {tokens, in}, {tokens, out}, std::nullopt);
  }
}

TEST(Linear, GradientsWithAnAddend) {
  Random random(13, 1);
  auto inputs = make_inputs({5, 7, 6}, random);
  inputs.push_back({random_tensor(DType::kF32, {5, 6}, random), Role::kValue, "addend"});
  check_gradients(std::make_shared<Linear>(Linear::Extra::kAddend), kernels(), inputs);
}

TEST(Linear, ShapeRuleAndCost) {
  const ValueType x{DType::kBF16, {64, 16}, 0, 5};
  const ValueType weight{DType::kBF16, {32, 16}};
  const ValueType types[] = {x, weight};
  const auto op = make_linear();
  const auto outputs = op->infer(types);
  EXPECT_EQ(outputs[0], (ValueType{DType::kBF16, {64, 32}, 0, 5}));
  const Cost cost = op->cost(types, outputs);
  EXPECT_EQ(cost.flops, 2.0 * 64 * 32 * 16);
  EXPECT_EQ(cost.bytes, 2.0 * (64 * 16 + 32 * 16 + 64 * 32));

  const ValueType backward_types[] = {outputs[0], weight};
  const LinearDgrad dgrad;
  EXPECT_EQ(dgrad.infer(backward_types)[0], x);
  EXPECT_EQ(dgrad.cost(backward_types, dgrad.infer(backward_types)).flops, cost.flops);
  const ValueType wgrad_types[] = {x, outputs[0]};
  const LinearWgrad wgrad;
  EXPECT_EQ(wgrad.infer(wgrad_types)[0], (ValueType{DType::kF32, {32, 16}}));
  EXPECT_EQ(wgrad.cost(wgrad_types, wgrad.infer(wgrad_types)).flops, cost.flops);
}

TEST(Linear, ShapeRuleRefusesWhatDoesNotFit) {
  const ValueType x{DType::kF32, {4, 16}};
  const ValueType weight{DType::kF32, {32, 16}};
  const auto refuses = [](bool bias, const std::vector<ValueType>& types, const char* message) {
    EXPECT_THAT([&] { make_linear(bias)->infer(types); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses(false, {x}, "linear: takes 2 inputs, got 1");
  refuses(false, {x, with_last_dim(weight, 15)}, "linear: x f32 [4, 16] has 16 features");
  refuses(false, {x, with_dtype(weight, DType::kBF16)}, "linear: the weight must be f32");
  refuses(false, {{DType::kF32, {4}}, weight}, "linear: x must be f32, bf16 or f16 [T, features]");
  refuses(true, {x, weight, {DType::kF32, {31}}}, "linear: the bias must be f32 [32]");
  refuses(true, {x, weight, {DType::kBF16, {32}}}, "linear: the bias must be f32 [32]");
  const Linear adding(Linear::Extra::kAddend);
  EXPECT_THAT(
      [&] {
        adding.infer(std::vector<ValueType>{x, weight, x});
      },
      ::testing::ThrowsMessage<UserError>(
          ::testing::HasSubstr("linear: the addend must be f32 [4, 32]")));
}

}  // namespace
}  // namespace tessera::testing
