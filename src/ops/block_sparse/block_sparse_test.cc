#include "ops/block_sparse/block_sparse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "ops/block_sparse/layer_testing.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"

namespace tessera {
namespace {

using testing::build_block_sparse_layer;
using testing::fill_inputs;
using testing::layer_kernels;
using testing::LayerCase;
using testing::LayerValues;
using testing::ProgramRun;
using testing::to_doubles;

double gelu_tanh_u(double x) {
  return std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
}

double activate(Activation kind, double x) {
  if (kind == Activation::kSwiGLU) return x / (1.0 + std::exp(-x));
  if (kind == Activation::kGelu || kind == Activation::kGeGLU) {
    return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
  }
  return 0.5 * x * (1.0 + std::tanh(gelu_tanh_u(x)));
}

/// In double a central difference of this step is exact to 1e-9 relative.
double activate_slope(Activation kind, double x) {
  constexpr double kStep = 1e-5;
  return (activate(kind, x + kStep) - activate(kind, x - kStep)) / (2.0 * kStep);
}

/// The layer row by row in double: each row alone through its expert, forward and backward. For
/// BF16 the values that are stored between operators are rounded as they are there, so that what is
/// compared is the arithmetic.
class Reference {
 public:
  Reference(const LayerCase& layer, const LayerValues& v, const ProgramRun& run)
      : layer_(layer),
        rows_(to_doubles(run.value(v.rows_RH))),
        probs_(to_doubles(run.value(v.probs_R))),
        w1_(to_doubles(run.value(v.w1))),
        w2_(to_doubles(run.value(v.w2))),
        grad_y_(to_doubles(run.grad(v.y_RH))),
        y(rows_.size()),
        grad_rows(rows_.size()),
        grad_probs(probs_.size()),
        grad_w1(w1_.size()),
        grad_w2(w2_.size()) {
    const auto offsets = layer.offsets();
    int64_t inner_start = 0;
    for (size_t expert = 0; expert < layer.sizes.size(); ++expert) {
      for (int64_t row = offsets[expert]; row < offsets[expert + 1]; ++row) {
        run_row(static_cast<size_t>(row), inner_start, layer.sizes[expert]);
      }
      inner_start += layer.sizes[expert];
    }
  }

 private:
  double dot(const double* a, const double* b) const {
    return std::inner_product(a, a + layer_.hidden, b, 0.0);
  }
  void add_scaled(double* to, double factor, const double* from) const {
    for (int64_t i = 0; i < layer_.hidden; ++i) to[i] += factor * from[i];
  }

  double stored(double value) const {
    return layer_.dtype == DType::kBF16 ? Bf16(static_cast<float>(value)) : value;
  }

  void run_row(size_t row, int64_t inner_start, int64_t size) {
    const size_t hidden = layer_.hidden;
    const double* x = &rows_[row * hidden];
    const double* grad = &grad_y_[row * hidden];
    const double prob = probs_[row];
    const bool gated = is_gated(layer_.activation);
    for (int64_t f = 0; f < size; ++f) {
      const auto gate_at = static_cast<size_t>(inner_start * layer_.gates() + f) * hidden;
      const auto up_at = gate_at + static_cast<size_t>(size) * hidden;
      const auto w2_at = static_cast<size_t>(inner_start + f) * hidden;
      const double gate = stored(dot(x, &w1_[gate_at]));
      const double up = gated ? stored(dot(x, &w1_[up_at])) : 1.0;
      const double value = activate(layer_.activation, gate);
      const double act = stored(prob * value * up);
      add_scaled(&y[row * hidden], act, &w2_[w2_at]);
      const double grad_act = stored(dot(grad, &w2_[w2_at]));
      grad_probs[row] += grad_act * value * up;
      add_scaled(&grad_w2[w2_at], act, grad);
      const double grad_gate =
          stored(grad_act * prob * up * activate_slope(layer_.activation, gate));
      add_scaled(&grad_w1[gate_at], grad_gate, x);
      add_scaled(&grad_rows[row * hidden], grad_gate, &w1_[gate_at]);
      if (!gated) continue;
      const double grad_up = stored(grad_act * prob * value);
      add_scaled(&grad_w1[up_at], grad_up, x);
      add_scaled(&grad_rows[row * hidden], grad_up, &w1_[up_at]);
    }
  }

  const LayerCase& layer_;
  std::vector<double> rows_, probs_, w1_, w2_, grad_y_;

 public:
  std::vector<double> y, grad_rows, grad_probs, grad_w1, grad_w2;
};

/// Compares the first `num_rows` rows.
void expect_rows(const Tensor& actual, const std::vector<double>& expected, int64_t num_rows,
                 double tolerance, const std::string& what) {
  Tensor part = actual;
  part.shape[0] = num_rows;
  const size_t count = part.num_elements();
  const auto reference = testing::tensor_of(
      part.shape,
      std::vector<float>(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(count)));
  testing::expect_rows_near(part, reference, tolerance, what);
}

/// Probabilities' gradients, each a number: against the largest.
void expect_values(const Tensor& actual, const std::vector<double>& expected, int64_t count,
                   double tolerance, const std::string& what) {
  double largest = 1e-30;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::abs(expected[i]));
  }
  for (int64_t i = 0; i < count; ++i) {
    EXPECT_NEAR(actual.as<float>()[i], expected[i], tolerance * largest) << what << " of row " << i;
  }
}

void check_layer(const LayerCase& layer, uint64_t seed) {
  Random random(seed, 0);
  Program program("experts");
  const LayerValues v = build_block_sparse_layer(layer, program);
  const ProgramRun run(program, {{v.y_RH}, {v.rows_RH, v.probs_R}}, layer_kernels());
  fill_inputs(layer, v, run, random);
  run.run_forward();
  run.run_backward();
  const Reference reference(layer, v, run);
  const int64_t num_rows = layer.offsets().back();
  // BF16: a sum that lies between two BF16 numbers may be stored as the other one, up to 2^-7 away.
  const double tolerance = layer.dtype == DType::kBF16 ? 0x1.2p-7 : 1e-5;
  expect_rows(run.value(v.y_RH), reference.y, num_rows, tolerance, "output");
  expect_rows(run.grad(v.rows_RH), reference.grad_rows, num_rows, tolerance, "gradient of rows");
  expect_values(run.grad(v.probs_R), reference.grad_probs, num_rows, tolerance,
                "gradient of probabilities");
  // An expert of one row where the activation is nearly flat: the slope is a small difference.
  expect_rows(run.grad(v.w1), reference.grad_w1, run.grad(v.w1).shape[0], std::max(tolerance, 2e-4),
              "gradient of w1");
  expect_rows(run.grad(v.w2), reference.grad_w2, run.grad(v.w2).shape[0], tolerance,
              "gradient of w2");
}

TEST(BlockSparseLayer, EveryActivationAgainstRowsInDouble) {
  for (const auto activation : {Activation::kSwiGLU, Activation::kGeGLU, Activation::kGeGLUTanh,
                                Activation::kGelu, Activation::kGeluTanh}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(fmt::format("{} {}", activation_name(activation), dtype_name(dtype)));
      check_layer(
          {.activation = activation, .dtype = dtype, .sizes = {32, 32, 32}, .rows = {20, 5, 16}},
          31);
    }
  }
}

TEST(BlockSparseLayer, ExpertsOfDifferentSizesAndEmptyOnes) {
  for (const int64_t size : {8, 16, 32, 128}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(fmt::format("block {} {}", size, dtype_name(dtype)));
      check_layer({.dtype = dtype,
                   .block_size = size,
                   .sizes = {2 * size, size, 4 * size, size, 3 * size},
                   .rows = {0, size + 3, 2 * size, 0, 1}},
                  32);
    }
  }
}

TEST(BlockSparseLayer, NoRowsAtAll) {
  check_layer({.sizes = {16, 48}, .rows = {0, 0}}, 33);
  check_layer({.sizes = {16, 48}, .rows = {0, 0}, .spare_rows = 0}, 34);
}

TEST(BlockSparseLayer, RandomRoutings) {
  Random random(35, 0);
  for (int round = 0; round < 12; ++round) {
    LayerCase layer{.block_size = 8,
                    .hidden = 1 + static_cast<int64_t>(random.next_below(40)),
                    .sizes = {},
                    .rows = {}};
    const auto num_experts = 1 + random.next_below(6);
    for (uint64_t expert = 0; expert < num_experts; ++expert) {
      layer.sizes.push_back(8 * (1 + static_cast<int64_t>(random.next_below(4))));
      layer.rows.push_back(static_cast<int64_t>(random.next_below(30)));
    }
    layer.spare_rows = static_cast<int64_t>(random.next_below(20));
    check_layer(layer, 100 + static_cast<uint64_t>(round));
  }
}

TEST(BlockSparseLayer, GradientsAccumulateOverMicroBatches) {
  const LayerCase layer{.sizes = {16, 32}, .rows = {9, 30}};
  Random random(36, 0);
  Program program("experts");
  const LayerValues v = build_block_sparse_layer(layer, program);
  const ProgramRun run(program, {{v.y_RH}, {v.rows_RH, v.probs_R}}, layer_kernels());
  fill_inputs(layer, v, run, random);
  run.run_forward();
  run.run_backward();
  const std::vector<double> once = to_doubles(run.grad(v.w1));
  run.run_backward();
  const std::vector<double> twice = to_doubles(run.grad(v.w1));
  for (size_t i = 0; i < once.size(); ++i) EXPECT_FLOAT_EQ(twice[i], 2.0 * once[i]);
}

// Nothing that a routing decides is computed twice, and no expert output is kept for the backward
// pass.
TEST(BlockSparseLayer, KeepsThePreActivationButNoExpertOutput) {
  const LayerCase layer{.sizes = {16, 32}, .rows = {9, 30}};
  Program program("experts");
  const LayerValues v = build_block_sparse_layer(layer, program);
  const Backward backward = differentiate(program, {{v.y_RH}, {v.rows_RH, v.probs_R}});
  std::vector<std::string> kept;
  for (const Link& link : backward.saved) kept.push_back(program.value(link.forward).name);
  EXPECT_THAT(kept, ::testing::Contains("pre"));
  EXPECT_THAT(kept, ::testing::Not(::testing::Contains("y")));
  for (const Link& link : backward.bound) EXPECT_NE(link.forward, v.y_RH);
}

}  // namespace
}  // namespace tessera
