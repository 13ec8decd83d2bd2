#include "optim/muon_kind.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "core/random.h"
#include "ops/newton_schulz/newton_schulz_testing.h"
#include "optim/optimizer.h"
#include "optim/replicas.h"

namespace tessera {
namespace {

using testing::Matrix;

struct Spec {
  Shape shape;
  std::vector<int64_t> matrix_rows;
  std::optional<bool> decay = std::nullopt;
  double lr_multiplier = 1;
};

/// F32 parameters with random weights, and gradients of any step.
struct Model {
  explicit Model(const std::vector<Spec>& specs, uint64_t seed = 1) {
    Random random(seed, 0);
    for (const Spec& spec : specs) {
      weights.emplace_back(DType::kF32, spec.shape);
      grads.emplace_back(DType::kF32, spec.shape);
      fill(weights.back(), random);
      parameters.push_back({.name = fmt::format("p{}", parameters.size()),
                            .weight = weights.back(),
                            .grad = grads.back(),
                            .decay = spec.decay,
                            .lr_multiplier = spec.lr_multiplier,
                            .matrix_rows = spec.matrix_rows});
    }
  }

  static void fill(const Tensor& tensor, Random& random) {
    for (float& x : tensor.span<float>()) x = static_cast<float>(random.next_normal());
  }
  void make_gradients(uint64_t step) const {
    Random random(step, 1);
    for (const OwnedTensor& grad : grads) fill(grad, random);
  }

  std::vector<OwnedTensor> weights, grads;
  std::vector<Parameter> parameters;
};

/// One matrix of a parameter under Muon, in double.
struct Reference {
  Tensor grad;
  Matrix p, m;
  double decay = 0;
  double lr_multiplier = 1;

  static std::vector<Reference> of(const Parameter& parameter, double weight_decay) {
    std::vector<Reference> result;
    IndexRange rows;
    for (const int64_t count : parameter.matrix_rows) {
      rows = {rows.end(), count};
      const int64_t cols = parameter.weight.shape[1];
      const auto values = take_rows(parameter.weight, rows).span<float>();
      result.push_back({.grad = take_rows(parameter.grad, rows),
                        .p = {count, cols, {values.begin(), values.end()}},
                        .m = {count, cols, std::vector<double>(count * cols)},
                        .decay = parameter.decay.value_or(true) ? weight_decay : 0,
                        .lr_multiplier = parameter.lr_multiplier});
    }
    return result;
  }

  void step(double lr, double scale) {
    lr *= lr_multiplier;
    Matrix u = m;
    for (size_t i = 0; i < m.at.size(); ++i) {
      const double g = grad.as<float>()[i] * scale;
      m.at[i] = 0.95 * m.at[i] + 0.05 * g;
      u.at[i] = 0.95 * m.at[i] + 0.05 * g;
    }
    const Matrix o = testing::orthogonalize_plainly(u, 5);
    const double size = 0.2 * std::sqrt(static_cast<double>(std::max(p.rows, p.cols)));
    for (size_t i = 0; i < p.at.size(); ++i)
      p.at[i] = p.at[i] * (1 - lr * decay) - lr * size * o.at[i];
  }
};

TEST(Muon, StepsAreThoseOfAPlainReference) {
  const std::vector<Spec> specs = {{{12, 20}, {12}},
                                   {{24, 20}, {5, 5, 7, 7}, false},
                                   {{20, 8}, {20}, true, 0.5},
                                   {{9, 3}, {1, 8}}};
  const OptimizerOptions options = {.weight_decay = 0.3};
  const Model model(specs);
  std::vector<std::vector<Reference>> references;
  for (const Parameter& p : model.parameters)
    references.push_back(Reference::of(p, options.weight_decay));
  Optimizer optimizer(model.parameters, options);
  for (int64_t step = 0; step < 6; ++step) {
    model.make_gradients(static_cast<uint64_t>(step));
    const StepInput input = {
        .step_idx = step, .lr = 0.05, .max_grad_norm = 3.0, .grad_scale = 0.25};
    const StepResult result = optimizer.step(input);
    EXPECT_LT(result.clip_factor, 1);
    for (auto& matrices : references) {
      for (Reference& matrix : matrices) matrix.step(0.05, 0.25 * result.clip_factor);
    }
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    const float* weight = model.weights[i].get().as<float>();
    for (const Reference& matrix : references[i]) {
      for (const double expected : matrix.p.at)
        ASSERT_NEAR(*weight++, expected, 2e-4) << "parameter " << i;
    }
  }
}

TEST(Muon, LeavesOthersToAdamW) {
  const std::vector<Spec> specs = {{{12, 20}, {12}}, {{24, 20}, {}}, {{7}, {}}};
  const Model mixed(specs);
  const Model plain({{{12, 20}, {}}, {{24, 20}, {}}, {{7}, {}}});
  Optimizer muon(mixed.parameters, {});
  Optimizer adamw(plain.parameters, {});
  for (int64_t step = 0; step < 3; ++step) {
    mixed.make_gradients(static_cast<uint64_t>(step));
    plain.make_gradients(static_cast<uint64_t>(step));
    muon.step({.step_idx = step, .lr = 0.1});
    adamw.step({.step_idx = step, .lr = 0.1});
  }
  const auto equal = [&](size_t i) {
    return std::ranges::equal(mixed.weights[i].get().span<float>(),
                              plain.weights[i].get().span<float>());
  };
  EXPECT_FALSE(equal(0));
  EXPECT_TRUE(equal(1));
  EXPECT_TRUE(equal(2));
  std::vector<std::string> names;
  for (const NamedTensor& state : muon.state()) names.push_back(state.name);
  EXPECT_EQ(names, (std::vector<std::string>{"p0.m", "p1.m", "p1.v", "p2.m", "p2.v"}));
}

TEST(Muon, AStepThatIsNotFiniteChangesNothing) {
  const Model model({{{12, 20}, {12}}});
  Optimizer optimizer(model.parameters, {});
  model.make_gradients(1);
  model.grads[0].get().as<float>()[5] = NAN;
  const auto values = model.weights[0].get().span<float>();
  const std::vector<float> before(values.begin(), values.end());
  EXPECT_FALSE(optimizer.step({.lr = 0.1}).updated);
  EXPECT_TRUE(std::ranges::equal(before, values));
  for (const float m : optimizer.state()[0].tensor.span<float>()) EXPECT_EQ(m, 0);
}

/// More matrices than a batch takes come out as they do alone.
TEST(Muon, BatchesChangeNoBits) {
  constexpr int64_t kCount = 20;
  constexpr int64_t kSize = 256;
  const Model together({{{kCount * kSize, kSize}, std::vector<int64_t>(kCount, kSize)}});
  const Model alone({{{kCount * kSize, kSize}, {}}});
  Optimizer optimizer(together.parameters, {});
  together.make_gradients(1);
  alone.make_gradients(1);
  optimizer.step({.lr = 0.1});
  const int64_t all = 4 * kCount * kSize * kSize;
  EXPECT_LT(optimizer.workspace_bytes(), 4 * all);
  for (int64_t i = 0; i < kCount; i += 7) {
    Parameter one = take_rows(alone.parameters[0], {i * kSize, kSize});
    one.matrix_rows = {kSize};
    Optimizer single({one}, {});
    single.step({.lr = 0.1});
    EXPECT_TRUE(std::ranges::equal(
        one.weight.span<float>(),
        take_rows(together.parameters[0].weight, {i * kSize, kSize}).span<float>()));
  }
}

TEST(Muon, ScratchMemoryIsPredicted) {
  for (const std::vector<int64_t>& rows :
       {std::vector<int64_t>{40}, std::vector<int64_t>{4, 4, 16, 16}, std::vector<int64_t>{}}) {
    const Model model({{{40, 24}, rows}, {{24}, {}}});
    const Optimizer optimizer(model.parameters, {});
    std::vector<Parameter> types = model.parameters;
    for (Parameter& p : types) p.weight.data = p.grad.data = nullptr;
    EXPECT_EQ(Optimizer::workspace_bytes(types, {}, optimizer_on_host()),
              optimizer.workspace_bytes());
    EXPECT_EQ(Optimizer::state_bytes(types), optimizer.state_bytes());
    EXPECT_EQ(optimizer.workspace_bytes() == 0, rows.empty());
  }
}

TEST(Muon, RefusesMatricesThatAreNotTheParameters) {
  EXPECT_THROW(Optimizer(Model({{{12, 20}, {5, 5}}}).parameters, {}), InternalError);
  EXPECT_THROW(Optimizer(Model({{{12}, {12}}}).parameters, {}), InternalError);
}

}  // namespace
}  // namespace tessera
