#include "ops/linear/joined_linear.h"

#include <gtest/gtest.h>

#include "ops/linear/linear.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_linear_cpu(table);
  add_joined_linear_cpu(table);
  return table;
}

struct Case {
  int64_t tokens, in;
  std::vector<int64_t> out;
  DType dtype = DType::kF32;
  bool addend = false;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool addend : {false, true}) {
      all.push_back({0, 8, {4, 4}, dtype, addend});
      all.push_back({1, 1, {1, 2}, dtype, addend});
      all.push_back({7, 16, {33, 5, 1}, dtype, addend});
      all.push_back({40, 24, {8, 16, 3, 9}, dtype, addend});
    }
  }
  return all;
}

TEST(JoinedLinear, GivesWhatTheProductsGiveAlone) {
  for (const Case& c : cases()) {
    Random random(1, static_cast<uint64_t>(c.tokens));
    std::vector<TestInput> inputs;
    inputs.push_back({random_tensor(c.dtype, {c.tokens, c.in}, random), Role::kValue, "x"});
    for (const int64_t out : c.out)
      inputs.push_back({random_tensor(c.dtype, {out, c.in}, random), Role::kWeight, "w"});
    const JoinedLinear op(static_cast<int>(c.out.size()));
    const auto joined = run_operator(op, kernels(), inputs);
    Random again(1, static_cast<uint64_t>(c.tokens));
    OwnedTensor x = random_tensor(c.dtype, {c.tokens, c.in}, again);
    std::vector<TestInput> one = list_inputs(TestInput{std::move(x), Role::kValue, "x"});
    one.push_back({});
    for (size_t i = 0; i < c.out.size(); ++i) {
      one[1] = {random_tensor(c.dtype, {c.out[i], c.in}, again), Role::kWeight, "w"};
      const auto alone = run_operator(*make_linear(), kernels(), one);
      expect_bitwise_equal(joined[i].get(), alone[0].get(), fmt::format("product {}", i));
    }
  }
}

/// ((grad_0 · w_0 (+ addend)) + grad_1 · w_1) + ..., each sum rounded to the type.
OwnedTensor sum_in_order(const Case& c, const std::vector<TestInput>& inputs) {
  const size_t count = c.out.size();
  OwnedTensor sum = tensor_of({c.tokens, c.in},
                              std::vector<float>(static_cast<size_t>(c.tokens * c.in)), c.dtype);
  std::vector<double> total(static_cast<size_t>(c.tokens * c.in));
  if (c.addend) total = to_doubles(inputs[2 * count].tensor.get());
  for (size_t i = 0; i < count; ++i) {
    const auto grad = to_doubles(inputs[2 * i].tensor.get());
    const auto weight = to_doubles(inputs[2 * i + 1].tensor.get());
    std::vector<float> rounded;
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t k = 0; k < c.in; ++k) {
        double value = total[t * c.in + k];
        for (int64_t o = 0; o < c.out[i]; ++o)
          value += grad[t * c.out[i] + o] * weight[o * c.in + k];
        rounded.push_back(static_cast<float>(value));
      }
    }
    sum = tensor_of({c.tokens, c.in}, rounded, c.dtype);
    total = to_doubles(sum.get());
  }
  return sum;
}

TEST(JoinedLinearDgrad, AddsTheProductsInOrder) {
  for (const Case& c : cases()) {
    Random random(2, static_cast<uint64_t>(c.tokens));
    std::vector<TestInput> inputs;
    for (const int64_t out : c.out) {
      inputs.push_back({random_tensor(c.dtype, {c.tokens, out}, random), Role::kConstant, "g"});
      inputs.push_back({random_tensor(c.dtype, {out, c.in}, random), Role::kConstant, "w"});
    }
    if (c.addend)
      inputs.push_back({random_tensor(c.dtype, {c.tokens, c.in}, random), Role::kConstant, "a"});
    const JoinedLinearDgrad op(static_cast<int>(c.out.size()), c.addend);
    const auto sum = run_operator(op, kernels(), inputs);
    // A sum near the middle between two BF16 numbers may be rounded to either.
    expect_rows_near(sum[0].get(), sum_in_order(c, inputs).get(),
                     c.dtype == DType::kF32 ? 2e-6 : 4e-3, "sum");
  }
}

TEST(JoinedLinearWgrad, GivesWhatTheGradientsAreAlone) {
  for (const Case& c : cases()) {
    const auto draw = [&](Random& random, int64_t columns) {
      return random_tensor(c.dtype, {c.tokens, columns}, random);
    };
    Random random(3, static_cast<uint64_t>(c.tokens));
    std::vector<TestInput> inputs;
    inputs.push_back({draw(random, c.in), Role::kConstant, "x"});
    for (const int64_t out : c.out) inputs.push_back({draw(random, out), Role::kConstant, "g"});
    const JoinedLinearWgrad op(static_cast<int>(c.out.size()));
    const auto joined = run_operator(op, kernels(), inputs);
    Random again(3, static_cast<uint64_t>(c.tokens));
    std::vector<TestInput> one = list_inputs(TestInput{draw(again, c.in), Role::kConstant, "x"});
    one.push_back({});
    for (size_t i = 0; i < c.out.size(); ++i) {
      one[1] = {draw(again, c.out[i]), Role::kConstant, "g"};
      const auto alone = run_operator(LinearWgrad(), kernels(), one);
      expect_bitwise_equal(joined[i].get(), alone[0].get(), fmt::format("gradient {}", i));
    }
  }
}

TEST(JoinedLinear, RefusesWhatCannotBeJoined) {
  const ValueType x{DType::kF32, {4, 8}};
  const ValueType w{DType::kF32, {3, 8}};
  const ValueType narrow{DType::kF32, {3, 7}};
  EXPECT_THROW(JoinedLinear(1), InternalError);
  EXPECT_THROW(JoinedLinear(5), InternalError);
  const ValueType two[] = {x, w};
  EXPECT_THROW(JoinedLinear(2).infer(two), UserError);
  const ValueType other[] = {x, w, narrow};
  EXPECT_THROW(JoinedLinear(2).infer(other), UserError);
  const ValueType g{DType::kF32, {4, 3}};
  const ValueType sums[] = {g, w, g, narrow};
  EXPECT_THROW(JoinedLinearDgrad(2, false).infer(sums), UserError);
  const ValueType addend[] = {g, w, g, w, g};
  EXPECT_THROW(JoinedLinearDgrad(2, true).infer(addend), UserError);
}

TEST(JoinedLinear, CostsWhatTheProductsCost) {
  const ValueType x{DType::kF32, {4, 8}};
  const ValueType inputs[] = {x, {DType::kF32, {3, 8}}, {DType::kF32, {5, 8}}};
  const JoinedLinear op(2);
  EXPECT_EQ(op.cost(inputs, op.infer(inputs)).flops, 2.0 * 4 * 8 * (3 + 5));
  const ValueType grads[] = {{DType::kF32, {4, 3}}, inputs[1], {DType::kF32, {4, 5}}, inputs[2]};
  const JoinedLinearDgrad sum(2, false);
  EXPECT_EQ(sum.cost(grads, sum.infer(grads)).flops, 2.0 * 4 * 8 * (3 + 5));
}

}  // namespace
}  // namespace tessera::testing
