#include "optim/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "core/random.h"
#include "optim/host_updates.h"
#include "optim/schedule.h"

namespace tessera {
namespace {

/// Weights and gradients of a few shapes, with the parameters that view them.
struct Model {
  std::vector<OwnedTensor> weights;
  std::vector<OwnedTensor> grads;
  std::vector<Parameter> parameters;

  Model(const std::vector<Shape>& shapes, DType dtype, uint64_t seed = 1) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      weights.emplace_back(dtype, shapes[i]);
      grads.emplace_back(DType::kF32, shapes[i]);
      parameters.push_back({.name = fmt::format("p{}", i), .weight = weights[i], .grad = grads[i]});
    }
    Random random(seed, 0);
    for (const OwnedTensor& weight : weights) fill(weight, random);
    for (const OwnedTensor& grad : grads) fill(grad, random);
  }

  static void fill(const Tensor& tensor, Random& random) {
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      const auto value = static_cast<float>(random.next_normal());
      if (tensor.dtype == DType::kBF16) {
        tensor.as<Bf16>()[i] = Bf16(value);
      } else {
        tensor.as<float>()[i] = value;
      }
    }
  }

  std::vector<float> values(size_t idx) const {
    const auto span = weights[idx].get().span<float>();
    return {span.begin(), span.end()};
  }
};

const std::vector<Shape> kShapes = {{3, 5}, {7}, {2, 3, 4}, {0}, {1}, {33, 17}};

double norm_of(const Model& model) {
  double sum = 0;
  for (const OwnedTensor& grad : model.grads) {
    for (const float g : grad.get().span<float>()) sum += static_cast<double>(g) * g;
  }
  return std::sqrt(sum);
}

TEST(Optimizer, GradNormIsGlobal) {
  Model model(kShapes, DType::kF32);
  Optimizer optimizer(model.parameters, {});
  const double expected = norm_of(model);
  EXPECT_NEAR(optimizer.grad_norm(1.0), expected, 1e-12 * expected);
  EXPECT_NEAR(optimizer.grad_norm(0.5), 0.5 * expected, 1e-12 * expected);
}

/// A least-squares model y = W x + b in double, trained by AdamW as PyTorch does it.
struct ReferenceAdamW {
  std::vector<double> p, m, v;

  void step(const std::vector<double>& grad, double lr, int64_t update, const OptimizerOptions& o,
            bool decayed) {
    m.resize(p.size());
    v.resize(p.size());
    for (size_t i = 0; i < p.size(); ++i) {
      if (decayed) p[i] *= 1 - lr * o.weight_decay;
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * grad[i];
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * grad[i] * grad[i];
      const double m_hat = m[i] / (1 - std::pow(o.beta1, static_cast<double>(update)));
      const double v_hat = v[i] / (1 - std::pow(o.beta2, static_cast<double>(update)));
      p[i] -= lr * m_hat / (std::sqrt(v_hat) + o.eps);
    }
  }
};

constexpr size_t kIn = 4;
constexpr size_t kOut = 3;
constexpr size_t kSamples = 8;

/// Gradients of Σ (W x + b - y)² / 2 over a fixed batch, in double from weights of any type.
struct LeastSquares {
  std::vector<double> x, y;

  LeastSquares() {
    Random random(5, 5);
    for (size_t i = 0; i < kSamples * kIn; ++i) x.push_back(random.next_normal());
    for (size_t i = 0; i < kSamples * kOut; ++i) y.push_back(3 * random.next_normal());
  }

  template <typename T>
  void gradients(const T* weight, const T* bias, std::vector<double>& grad_weight,
                 std::vector<double>& grad_bias) const {
    grad_weight.assign(kOut * kIn, 0);
    grad_bias.assign(kOut, 0);
    for (size_t s = 0; s < kSamples; ++s) {
      for (size_t o = 0; o < kOut; ++o) {
        double error = static_cast<double>(bias[o]) - y[s * kOut + o];
        for (size_t i = 0; i < kIn; ++i)
          error += static_cast<double>(weight[o * kIn + i]) * x[s * kIn + i];
        grad_bias[o] += error;
        for (size_t i = 0; i < kIn; ++i) grad_weight[o * kIn + i] += error * x[s * kIn + i];
      }
    }
  }
};

double norm_of(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (const double g : a) sum += g * g;
  for (const double g : b) sum += g * g;
  return std::sqrt(sum);
}

double warmup_cosine(int64_t step) {
  if (step < 3) return 0.1 * static_cast<double>(step + 1) / 3;
  return 0.1 * (0.1 + 0.45 * (1 + std::cos(std::numbers::pi * static_cast<double>(step - 3) / 9)));
}

void expect_trajectory(bool decay_all, double grad_scale) {
  const OptimizerOptions options = {.weight_decay = 0.1, .decay_all = decay_all};
  const ScheduleSpec schedule = {.peak_lr = 0.1, .num_steps = 12, .warmup_steps = 3};
  Model model({{kOut, kIn}, {kOut}}, DType::kF32);
  Optimizer optimizer(model.parameters, options);
  ReferenceAdamW weight, bias;
  for (const float w : model.values(0)) weight.p.push_back(w);
  for (const float b : model.values(1)) bias.p.push_back(b);
  const LeastSquares problem;
  int num_clipped = 0;
  for (int64_t step = 0; step < 12; ++step) {
    std::vector<double> grad_w, grad_b;
    problem.gradients(weight.p.data(), bias.p.data(), grad_w, grad_b);
    const double norm = norm_of(grad_w, grad_b);
    const double clip = std::min(1.0, 40.0 / (norm + 1e-6));
    for (double& g : grad_w) g *= clip;
    for (double& g : grad_b) g *= clip;
    weight.step(grad_w, warmup_cosine(step), step + 1, options, true);
    bias.step(grad_b, warmup_cosine(step), step + 1, options, decay_all);

    problem.gradients(model.weights[0].get().as<float>(), model.weights[1].get().as<float>(),
                      grad_w, grad_b);
    for (size_t i = 0; i < grad_w.size(); ++i)
      model.grads[0].get().as<float>()[i] = static_cast<float>(grad_w[i] / grad_scale);
    for (size_t i = 0; i < grad_b.size(); ++i)
      model.grads[1].get().as<float>()[i] = static_cast<float>(grad_b[i] / grad_scale);
    const StepResult result = optimizer.step({.step_idx = step,
                                              .lr = learning_rate(schedule, step),
                                              .max_grad_norm = 40.0,
                                              .grad_scale = grad_scale});
    EXPECT_TRUE(result.updated);
    EXPECT_NEAR(result.grad_norm, norm, 1e-5 * norm) << "step " << step;
    EXPECT_NEAR(result.clip_factor, clip, 1e-5);
    num_clipped += result.clip_factor < 1.0 ? 1 : 0;
  }
  EXPECT_GT(num_clipped, 0);
  EXPECT_LT(num_clipped, 12);
  for (size_t i = 0; i < weight.p.size(); ++i) EXPECT_NEAR(model.values(0)[i], weight.p[i], 2e-5);
  for (size_t i = 0; i < bias.p.size(); ++i) EXPECT_NEAR(model.values(1)[i], bias.p[i], 2e-5);
}

TEST(Optimizer, TwelveStepsFollowPyTorchsArithmetic) {
  expect_trajectory(false, 1.0);
  expect_trajectory(true, 1.0);
  expect_trajectory(false, 0.125);
}

void set_all(const Tensor& tensor, float value) {
  std::ranges::fill(tensor.span<float>(), value);
}

TEST(Optimizer, DecaysMatricesUnlessToldOtherwise) {
  struct Expected {
    Shape shape;
    std::optional<bool> decay;
    bool decay_all;
    bool decayed;
  };
  for (const Expected& e :
       {Expected{{2, 2}, {}, false, true}, Expected{{4}, {}, false, false},
        Expected{{1, 1, 1}, {}, false, true}, Expected{{4}, {}, true, true},
        Expected{{2, 2}, false, true, false}, Expected{{4}, true, false, true}}) {
    Model model({e.shape}, DType::kF32);
    set_all(model.weights[0], 1.0F);
    set_all(model.grads[0], 0.0F);
    model.parameters[0].decay = e.decay;
    Optimizer optimizer(model.parameters, {.weight_decay = 0.5, .decay_all = e.decay_all});
    optimizer.step({.lr = 0.1});
    for (const float w : model.values(0)) EXPECT_FLOAT_EQ(w, e.decayed ? 0.95F : 1.0F);
  }
}

TEST(Optimizer, ExpertWithZeroGradientIsStillDecayed) {
  Model model({{4, 4}, {4, 4}}, DType::kF32);
  set_all(model.weights[1], 1.0F);
  set_all(model.grads[1], 0.0F);
  Optimizer optimizer(model.parameters, {.weight_decay = 0.1});
  double expected = 1.0;
  for (int64_t step = 0; step < 5; ++step) {
    optimizer.step({.step_idx = step, .lr = 0.1, .max_grad_norm = 1.0});
    expected *= 0.99;
  }
  for (const float w : model.values(1)) EXPECT_NEAR(w, expected, 1e-6);
}

TEST(Optimizer, LearningRateMultiplierScalesStepAndDecay) {
  Model fast({{3, 3}}, DType::kF32);
  Model slow({{3, 3}}, DType::kF32);
  slow.parameters[0].lr_multiplier = 0.25;
  Optimizer(fast.parameters, {}).step({.lr = 0.01});
  Optimizer(slow.parameters, {}).step({.lr = 0.04});
  EXPECT_EQ(fast.values(0), slow.values(0));
  slow.parameters[0].lr_multiplier = -1.0;
  EXPECT_THROW(Optimizer(slow.parameters, {}), UserError);
}

std::vector<std::vector<float>> snapshot(const Optimizer& optimizer) {
  std::vector<std::vector<float>> all;
  for (const NamedTensor& state : optimizer.state()) {
    const auto span = state.tensor.span<float>();
    all.emplace_back(span.begin(), span.end());
  }
  return all;
}

TEST(Optimizer, NonFiniteGradientChangesNothing) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Model model(kShapes, DType::kF32);
    Optimizer optimizer(model.parameters, {});
    optimizer.step({.lr = 0.01});
    const auto weights = model.values(5);
    const auto state = snapshot(optimizer);
    model.grads[5].get().as<float>()[100] = bad;
    const StepResult result = optimizer.step({.step_idx = 1, .lr = 0.01, .max_grad_norm = 1.0});
    EXPECT_FALSE(result.updated);
    EXPECT_FALSE(std::isfinite(result.grad_norm));
    EXPECT_EQ(model.values(5), weights);
    EXPECT_EQ(snapshot(optimizer), state);
  }
}

TEST(Optimizer, Bf16WeightFollowsAnF32Master) {
  Model narrow(kShapes, DType::kBF16);
  Model wide(kShapes, DType::kF32);
  for (size_t i = 0; i < kShapes.size(); ++i) {
    std::ranges::copy(narrow.weights[i].get().span<Bf16>(), wide.weights[i].get().as<float>());
  }
  Optimizer narrow_optimizer(narrow.parameters, {});
  Optimizer wide_optimizer(wide.parameters, {});
  for (int64_t step = 0; step < 20; ++step) {
    narrow_optimizer.step({.step_idx = step, .lr = 1e-4, .max_grad_norm = 1.0});
    wide_optimizer.step({.step_idx = step, .lr = 1e-4, .max_grad_norm = 1.0});
  }
  for (size_t i = 0; i < kShapes.size(); ++i) {
    const Tensor master = narrow_optimizer.state()[3 * i + 2].tensor;
    for (int64_t j = 0; j < master.num_elements(); ++j) {
      EXPECT_EQ(master.as<float>()[j], wide.weights[i].get().as<float>()[j]);
      EXPECT_EQ(narrow.weights[i].get().as<Bf16>()[j].bits, Bf16(master.as<float>()[j]).bits);
    }
  }
}

/// An update with factors is the one without, and then the factors: moments stay as they are.
TEST(Optimizer, FactorsOfRowsFollowTheUpdate) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Model plain(kShapes, dtype);
    Model scaled(kShapes, dtype);
    for (const size_t idx : {0, 1, 3, 5}) scaled.parameters[idx].scales_rows = true;
    Optimizer expected(plain.parameters, {});
    Optimizer optimizer(scaled.parameters, {});
    const StepInput input{.lr = 1e-2};
    expected.step(input);
    std::vector<size_t> asked;
    optimizer.set_row_factors([&](size_t idx, std::span<float> factors) {
      asked.push_back(idx);
      ASSERT_EQ(std::ssize(factors), kShapes[idx][0]);
      for (size_t row = idx == 5 ? 0 : 1; row < factors.size(); row += 2) factors[row] = 0.5F;
    });
    EXPECT_EQ(asked, std::vector<size_t>({0, 1, 5}));
    optimizer.step(input);
    for (size_t idx = 0; idx < kShapes.size(); ++idx) {
      const int64_t rows = std::max<int64_t>(kShapes[idx][0], 1);
      const int64_t columns = kShapes[idx].num_elements() / rows;
      const auto factor = [&](int64_t i) {
        const bool halves =
            scaled.parameters[idx].scales_rows && (i / columns + (idx == 5)) % 2 == 1;
        return halves ? 0.5F : 1.0F;
      };
      const auto value = [&](const Model& model, int64_t i) {
        const Tensor weight = model.weights[idx];
        return dtype == DType::kF32 ? weight.as<float>()[i]
                                    : static_cast<float>(weight.as<Bf16>()[i]);
      };
      // Halves are exact.
      for (int64_t i = 0; i < kShapes[idx].num_elements(); ++i)
        ASSERT_EQ(value(scaled, i), value(plain, i) * factor(i)) << idx << " " << i;
    }
    const auto state = optimizer.state();
    const auto other = expected.state();
    for (size_t i = 0; i < state.size(); ++i) {
      if (state[i].name.ends_with(".master")) continue;
      EXPECT_TRUE(std::ranges::equal(state[i].tensor.span<float>(), other[i].tensor.span<float>()))
          << state[i].name;
    }
  }
}

TEST(Optimizer, StateHasNamesShapesAndPredictedSize) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Model model(kShapes, dtype);
    Optimizer optimizer(model.parameters, {});
    std::vector<std::string> names;
    int64_t bytes = 0;
    for (const NamedTensor& state : optimizer.state()) {
      names.push_back(state.name);
      bytes += align_up(state.tensor.num_bytes());
    }
    const size_t per_parameter = dtype == DType::kBF16 ? 3 : 2;
    ASSERT_EQ(names.size(), per_parameter * kShapes.size());
    EXPECT_EQ(names[0], "p0.m");
    EXPECT_EQ(names[1], "p0.v");
    EXPECT_EQ(names[2], dtype == DType::kBF16 ? "p0.master" : "p1.m");
    EXPECT_EQ(optimizer.state()[0].tensor.shape, kShapes[0]);
    std::vector<Parameter> shapes_only;
    for (const Shape& shape : kShapes)
      shapes_only.push_back({.weight = {.data = nullptr, .dtype = dtype, .shape = shape}});
    EXPECT_EQ(Optimizer::state_bytes(shapes_only), bytes);
  }
}

// What a checkpoint does: state and weights copied into a fresh optimizer, which then continues bit
// for bit.
TEST(Optimizer, RestoredStateContinuesBitwise) {
  Model model(kShapes, DType::kBF16, 1);
  Optimizer optimizer(model.parameters, {});
  for (int64_t step = 0; step < 3; ++step) optimizer.step({.step_idx = step, .lr = 0.01});

  Model restored(kShapes, DType::kBF16, 2);
  Optimizer continued(restored.parameters, {});
  const auto saved = optimizer.state();
  const auto loaded = continued.state();
  for (size_t i = 0; i < saved.size(); ++i) {
    std::ranges::copy(saved[i].tensor.span<float>(), loaded[i].tensor.as<float>());
  }
  continued.round_masters();
  for (size_t i = 0; i < kShapes.size(); ++i) {
    std::ranges::copy(model.grads[i].get().span<float>(), restored.grads[i].get().as<float>());
  }
  optimizer.step({.step_idx = 3, .lr = 0.01});
  continued.step({.step_idx = 3, .lr = 0.01});
  EXPECT_EQ(snapshot(optimizer), snapshot(continued));
  for (size_t i = 0; i < kShapes.size(); ++i) {
    for (int64_t j = 0; j < kShapes[i].num_elements(); ++j) {
      EXPECT_EQ(model.weights[i].get().as<Bf16>()[j].bits,
                restored.weights[i].get().as<Bf16>()[j].bits);
    }
  }
}

TEST(Optimizer, ResetMastersTakesTheWeights) {
  Model model({{5, 3}}, DType::kBF16);
  Optimizer optimizer(model.parameters, {});
  Random random(3, 3);
  Model::fill(model.weights[0], random);
  optimizer.reset_masters();
  const Tensor master = optimizer.state()[2].tensor;
  for (int64_t i = 0; i < 15; ++i) {
    EXPECT_EQ(master.as<float>()[i], static_cast<float>(model.weights[0].get().as<Bf16>()[i]));
  }
}

TEST(Optimizer, DoesNotDependOnThreads) {
  const std::vector<Shape> shapes = {{300, 200}, {40001}};
  Model serial(shapes, DType::kF32);
  Model parallel(shapes, DType::kF32);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const StepResult one = Optimizer(serial.parameters, {}).step({.lr = 0.01, .max_grad_norm = 1.0});
  omp_set_num_threads(3);
  const StepResult three =
      Optimizer(parallel.parameters, {}).step({.lr = 0.01, .max_grad_norm = 1.0});
  omp_set_num_threads(threads);
  EXPECT_EQ(one.grad_norm, three.grad_norm);
  EXPECT_EQ(serial.values(0), parallel.values(0));
  EXPECT_EQ(serial.values(1), parallel.values(1));
}

/// Groups that the host updates pass through windows that two at a time share; weights that were
/// changed beside the optimizer, and masters, are what it goes on from.
TEST(Optimizer, UpdatesOnTheHostHaveTheSameBits) {
  const UpdateGroups groups{
      .groups = {{5, 0}, {1}, {2, 3}, {4}}, .on_host = true, .updated_on_host = true};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const MasterKind master : {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kNone}) {
      if (dtype == DType::kF32 && master != MasterKind::kF32) continue;
      OptimizerOptions options;
      options.formats.master = master;
      Model plain(kShapes, dtype);
      Model passing(kShapes, dtype);
      Optimizer expected(plain.parameters, options);
      Optimizer optimizer(passing.parameters, options, optimizer_on_host(), groups);
      EXPECT_EQ(optimizer.state_bytes(), expected.state_bytes());
      EXPECT_EQ(optimizer.host_updates().window_bytes(),
                Optimizer::host_window_bytes(passing.parameters, groups));
      EXPECT_EQ(Optimizer::window_bytes(passing.parameters, options.formats, groups), 0);
      for (int64_t step = 0; step < 4; ++step) {
        const StepInput input{.step_idx = step, .lr = 0.01, .max_grad_norm = 0.5};
        const StepResult result = optimizer.step(input);
        EXPECT_EQ(result.grad_norm, expected.step(input).grad_norm);
        EXPECT_LT(result.clip_factor, 1);
        if (step != 1) continue;
        for (const Model* model : {&plain, &passing}) {
          Random random(7, 7);
          for (const OwnedTensor& weight : model->weights) Model::fill(weight, random);
        }
        for (Optimizer* one : {&expected, &optimizer}) one->reset_masters();
      }
      const auto state = optimizer.state();
      const auto other = expected.state();
      ASSERT_EQ(state.size(), other.size());
      for (size_t i = 0; i < state.size(); ++i) {
        ASSERT_EQ(state[i].name, other[i].name);
        const size_t bytes = state[i].tensor.num_bytes();
        EXPECT_EQ(std::memcmp(state[i].tensor.data, other[i].tensor.data, bytes), 0)
            << state[i].name;
      }
      for (size_t i = 0; i < kShapes.size(); ++i) {
        const Tensor weight = passing.weights[i];
        EXPECT_EQ(std::memcmp(weight.data, plain.weights[i].get().data, weight.num_bytes()), 0);
      }
    }
  }
}

TEST(Optimizer, RefusesBadOptionsAndTensors) {
  Model model({{2, 2}}, DType::kF32);
  EXPECT_THROW(Optimizer(model.parameters, {.beta1 = 1.0}), UserError);
  EXPECT_THROW(Optimizer(model.parameters, {.weight_decay = -0.1}), UserError);
  model.parameters[0].grad.shape = {4};
  EXPECT_THROW(Optimizer(model.parameters, {}), InternalError);
}

}  // namespace
}  // namespace tessera
