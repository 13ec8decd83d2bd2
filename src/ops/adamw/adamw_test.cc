#include "ops/adamw/adamw.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "core/random.h"

namespace tessera {
namespace {

/// A slice of parameters between guard elements that no kernel may touch.
struct State {
  static constexpr size_t kGuard = 16;
  static constexpr float kGuardValue = 1234.5F;

  explicit State(size_t count)
      : n(count), master(make()), m(make()), v(make()), weight(n + 2 * kGuard, Bf16(kGuardValue)) {}

  std::vector<float> make() const {
    std::vector<float> data(kGuard, kGuardValue);
    data.resize(kGuard + n, 0.0F);
    data.resize(n + 2 * kGuard, kGuardValue);
    return data;
  }
  template <typename T>
  Tensor inner(std::vector<T>& data) const {
    return view(std::span(data).subspan(kGuard, n), {static_cast<int64_t>(n)});
  }
  template <typename T>
  static void expect_guards(const std::vector<T>& data) {
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(data[i], T(kGuardValue));
      EXPECT_EQ(data[data.size() - 1 - i], T(kGuardValue));
    }
  }

  size_t n;
  std::vector<float> master, m, v;
  std::vector<Bf16> weight;
};

void run_step(const AdamWSpec& spec, std::vector<float> grad, double lr, int64_t update,
              double grad_scale, State& state, float found_inf = 0) {
  const OperatorPtr op = make_adamw(spec);
  KernelTable kernels;
  add_adamw_cpu(kernels);
  AdamWFactors factors = make_adamw_factors(spec, lr, update);
  AdamWGradScale scale{static_cast<float>(grad_scale), found_inf};
  const Tensor inputs[] = {view(std::span(grad), {static_cast<int64_t>(grad.size())}),
                           view_of(factors), view_of(scale)};
  std::vector<Tensor> outputs = {state.inner(state.master), state.inner(state.m),
                                 state.inner(state.v)};
  if (spec.bf16_weight) outputs.push_back(state.inner(state.weight));
  kernels.at("adamw")(*op, {.inputs = inputs, .outputs = outputs, .workspace = {}});
}

/// torch.optim.AdamW of one element, in double.
struct Reference {
  double p = 0, m = 0, v = 0;

  void step(const AdamWSpec& spec, double grad, double lr, int64_t update) {
    p *= 1 - lr * spec.weight_decay;
    m = spec.beta1 * m + (1 - spec.beta1) * grad;
    v = spec.beta2 * v + (1 - spec.beta2) * grad * grad;
    const double m_hat = m / (1 - std::pow(spec.beta1, static_cast<double>(update)));
    const double v_hat = v / (1 - std::pow(spec.beta2, static_cast<double>(update)));
    p -= lr * m_hat / (std::sqrt(v_hat) + spec.eps);
  }
};

void fill_normal(Random& random, std::span<float> values) {
  for (float& value : values) value = static_cast<float>(random.next_normal());
}

void expect_follows_reference(const AdamWSpec& spec, size_t n, int64_t num_steps) {
  Random random(n, 1);
  State state(n);
  fill_normal(random, state.inner(state.master).span<float>());
  std::vector<Reference> reference(n);
  for (size_t i = 0; i < n; ++i) reference[i].p = state.inner(state.master).as<float>()[i];
  for (int64_t update = 1; update <= num_steps; ++update) {
    std::vector<float> grad(n);
    fill_normal(random, grad);
    const double lr = 1e-2 / static_cast<double>(update);
    run_step(spec, grad, lr, update, 0.5, state);
    for (size_t i = 0; i < n; ++i) reference[i].step(spec, 0.5 * grad[i], lr, update);
  }
  for (size_t i = 0; i < n; ++i) {
    // Up to a half ulp of rounding from each of a step's operations.
    EXPECT_NEAR(state.inner(state.master).as<float>()[i], reference[i].p,
                4e-6 * (1 + std::abs(reference[i].p)))
        << i << " of " << n;
    EXPECT_NEAR(state.inner(state.m).as<float>()[i], reference[i].m, 1e-6);
    EXPECT_NEAR(state.inner(state.v).as<float>()[i], reference[i].v, 1e-6);
  }
  State::expect_guards(state.master);
  State::expect_guards(state.m);
  State::expect_guards(state.v);
}

TEST(AdamW, FollowsDoubleReferenceOverManySteps) {
  for (const size_t n : {0, 1, 3, 16, 17, 63, 1001}) expect_follows_reference({}, n, 100);
  expect_follows_reference({}, 40003, 5);
}

TEST(AdamW, FollowsReferenceForOtherRates) {
  expect_follows_reference({.beta1 = 0.0, .beta2 = 0.999, .eps = 1e-3, .weight_decay = 0.0}, 77,
                           50);
  expect_follows_reference({.beta1 = 0.8, .beta2 = 0.5, .eps = 1e-12, .weight_decay = 1.0}, 77, 50);
}

// Values of torch.optim.AdamW's formula worked out by hand: m̂/√v̂ is 1 in the first step, whatever
// the gradient.
TEST(AdamW, FirstStepMovesByTheRate) {
  State state(2);
  std::ranges::fill(state.inner(state.master).span<float>(), 1.0F);
  run_step({.weight_decay = 0.1}, {5.0F, -0.001F}, 0.01, 1, 1.0, state);
  EXPECT_NEAR(state.inner(state.master).as<float>()[0], 0.999 - 0.01, 1e-6);
  EXPECT_NEAR(state.inner(state.master).as<float>()[1], 0.999 + 0.01, 1e-6);
}

TEST(AdamW, ZeroGradientDecaysOnly) {
  State state(3);
  std::ranges::fill(state.inner(state.master).span<float>(), 2.0F);
  run_step({.weight_decay = 0.5}, {0, 0, 0}, 0.1, 1, 1.0, state);
  for (const float p : state.inner(state.master).span<float>()) EXPECT_FLOAT_EQ(p, 1.9F);
}

TEST(AdamW, Bf16WeightIsTheRoundedMaster) {
  for (const size_t n : {0, 1, 31, 257, 20001}) {
    Random random(n, 2);
    State state(n);
    State plain(n);
    fill_normal(random, state.inner(state.master).span<float>());
    plain.master = state.master;
    std::vector<float> grad(n);
    fill_normal(random, grad);
    run_step({.bf16_weight = true}, grad, 1e-2, 1, 1.0, state);
    run_step({.bf16_weight = false}, grad, 1e-2, 1, 1.0, plain);
    EXPECT_EQ(state.master, plain.master);
    const Tensor master = state.inner(state.master);
    const Tensor weight = state.inner(state.weight);
    for (size_t i = 0; i < n; ++i) {
      EXPECT_EQ(weight.as<Bf16>()[i].bits, Bf16(master.as<float>()[i]).bits);
    }
    State::expect_guards(state.weight);
  }
}

TEST(AdamW, SlicesAreUpdatedAsEachAlone) {
  const AdamWSpec spec = {.bf16_weight = true};
  const OperatorPtr op = make_adamw(spec);
  KernelTable kernels;
  add_adamw_cpu(kernels);
  AdamWFactors factors = make_adamw_factors(spec, 1e-2, 1);
  AdamWGradScale scale{0.5F, 0};
  Random random(4, 4);
  std::vector<State> together, alone;
  std::vector<std::vector<float>> grads;
  for (const size_t n : {5, 0, 40003, 1}) {
    grads.emplace_back(n);
    fill_normal(random, grads.back());
    together.emplace_back(n);
    fill_normal(random, together.back().inner(together.back().master).span<float>());
    alone.push_back(together.back());
  }
  std::vector<Tensor> inputs, outputs;
  for (size_t i = 0; i < grads.size(); ++i) {
    run_step(spec, grads[i], 1e-2, 1, 0.5, alone[i]);
    inputs.push_back(view(std::span(grads[i]), {static_cast<int64_t>(grads[i].size())}));
    State& state = together[i];
    for (std::vector<float>* data : {&state.master, &state.m, &state.v})
      outputs.push_back(state.inner(*data));
    outputs.push_back(state.inner(state.weight));
  }
  inputs.push_back(view_of(factors));
  inputs.push_back(view_of(scale));
  kernels.at("adamw")(*op, {.inputs = inputs, .outputs = outputs, .workspace = {}});
  for (size_t i = 0; i < grads.size(); ++i) {
    EXPECT_EQ(together[i].master, alone[i].master) << i;
    EXPECT_EQ(together[i].m, alone[i].m) << i;
    EXPECT_EQ(together[i].v, alone[i].v) << i;
    for (size_t at = 0; at < together[i].weight.size(); ++at)
      EXPECT_EQ(together[i].weight[at].bits, alone[i].weight[at].bits) << i;
  }
}

/// Whatever the gradients are.
TEST(AdamW, FoundInfinityLeavesAllAsItIs) {
  State state(1001);
  Random random(3, 3);
  for (std::vector<float>* data : {&state.master, &state.m, &state.v})
    fill_normal(random, state.inner(*data).span<float>());
  const State before = state;
  run_step({.bf16_weight = true}, std::vector<float>(1001, NAN), 1e-2, 1, 1.0, state, 1);
  EXPECT_EQ(state.master, before.master);
  EXPECT_EQ(state.m, before.m);
  EXPECT_EQ(state.v, before.v);
  for (size_t i = 0; i < before.weight.size(); ++i)
    EXPECT_EQ(state.weight[i].bits, before.weight[i].bits);
}

TEST(AdamW, DoesNotDependOnThreads) {
  Random random(9, 9);
  std::vector<float> grad(70001);
  fill_normal(random, grad);
  State serial(grad.size());
  State parallel(grad.size());
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  run_step({}, grad, 1e-2, 1, 1.0, serial);
  omp_set_num_threads(3);
  run_step({}, grad, 1e-2, 1, 1.0, parallel);
  omp_set_num_threads(threads);
  EXPECT_EQ(serial.master, parallel.master);
  EXPECT_EQ(serial.v, parallel.v);
}

TEST(AdamW, RefusesRatesOutOfRange) {
  EXPECT_THROW(make_adamw({.beta1 = 1.0}), UserError);
  EXPECT_THROW(make_adamw({.beta2 = -0.1}), UserError);
  EXPECT_THROW(make_adamw({.eps = 0.0}), UserError);
  EXPECT_THROW(make_adamw({.weight_decay = -1.0}), UserError);
  EXPECT_THROW(make_adamw({.beta1 = std::nan("")}), UserError);
}

TEST(AdamW, ShapeRule) {
  const ValueType grad = {.dtype = DType::kF32, .shape = {10}};
  const ValueType factors = {.dtype = DType::kF32, .shape = {8}};
  const ValueType scale = {.dtype = DType::kF32, .shape = {2}};
  const OperatorPtr op = make_adamw({.bf16_weight = true});
  const std::vector<ValueType> outputs = op->infer(std::vector{grad, factors, scale});
  ASSERT_EQ(outputs.size(), 4U);
  EXPECT_EQ(outputs[0], grad);
  EXPECT_EQ(outputs[3], with_dtype(grad, DType::kBF16));
  const ValueType other = {.dtype = DType::kF32, .shape = {3}};
  const std::vector<ValueType> of_two = op->infer(std::vector{grad, other, factors, scale});
  ASSERT_EQ(of_two.size(), 8U);
  EXPECT_EQ(of_two[4], other);
  EXPECT_EQ(of_two[7], with_dtype(other, DType::kBF16));
  EXPECT_THROW(op->infer(std::vector{factors, scale}), UserError);
  EXPECT_THROW(op->infer(std::vector{grad, factors}), UserError);
  EXPECT_THROW(op->infer(std::vector{grad, scale, factors}), UserError);
  EXPECT_THROW(op->infer(std::vector{with_dtype(grad, DType::kBF16), factors, scale}), UserError);
}

}  // namespace
}  // namespace tessera
