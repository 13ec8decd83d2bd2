// The two implementations of a layer's experts over the same weights and rows.

#include <gtest/gtest.h>

#include "ops/block_sparse/layer_testing.h"

namespace tessera {
namespace {

using testing::LayerCase;
using testing::LayerValues;
using testing::ProgramRun;

/// A layer's program run forward and backward on the inputs that the seed gives.
struct LayerRun {
  LayerValues values;
  ProgramRun run;
};

using Build = LayerValues (*)(const LayerCase&, Program&);

LayerRun run_layer(const LayerCase& layer, Build build, uint64_t seed) {
  Program program("experts");
  const LayerValues v = build(layer, program);
  LayerRun result{
      v, ProgramRun(program, {{v.y_RH}, {v.rows_RH, v.probs_R}}, testing::layer_kernels())};
  Random random(seed, 0);
  fill_inputs(layer, v, result.run, random);
  result.run.run_forward();
  result.run.run_backward();
  return result;
}

/// Rounded to each row's norm, over the actual rows.
void expect_agreement(const LayerCase& layer, uint64_t seed) {
  const LayerRun sparse = run_layer(layer, testing::build_block_sparse_layer, seed);
  const LayerRun grouped = run_layer(layer, testing::build_grouped_layer, seed);
  const int64_t num_rows = layer.offsets().back();
  // The operands of every product are the same bits; the order of its sums may differ.
  const double tolerance = layer.dtype == DType::kBF16 ? 0x1.0p-8 : 1e-6;
  const auto compare = [&](Tensor actual, Tensor expected, bool by_rows, const char* what) {
    if (by_rows) actual.shape[0] = expected.shape[0] = num_rows;
    testing::expect_rows_near(actual, expected, tolerance, what);
  };
  const LayerValues& v = sparse.values;
  compare(sparse.run.value(v.y_RH), grouped.run.value(grouped.values.y_RH), true, "output");
  compare(sparse.run.grad(v.rows_RH), grouped.run.grad(grouped.values.rows_RH), true,
          "gradient of rows");
  compare(sparse.run.grad(v.probs_R), grouped.run.grad(grouped.values.probs_R), true,
          "gradient of probabilities");
  compare(sparse.run.grad(v.w1), grouped.run.grad(grouped.values.w1), false, "gradient of w1");
  compare(sparse.run.grad(v.w2), grouped.run.grad(grouped.values.w2), false, "gradient of w2");
}

TEST(ExpertPaths, AgreeToRounding) {
  Random random(51, 0);
  for (int round = 0; round < 10; ++round) {
    LayerCase layer{.activation = round % 2 == 0 ? Activation::kSwiGLU : Activation::kGelu,
                    .dtype = round % 4 < 2 ? DType::kF32 : DType::kBF16,
                    .hidden = 1 + static_cast<int64_t>(random.next_below(50)),
                    .sizes = {},
                    .rows = {}};
    const auto num_experts = 1 + random.next_below(6);
    for (uint64_t expert = 0; expert < num_experts; ++expert) {
      layer.sizes.push_back(16 * (1 + static_cast<int64_t>(random.next_below(4))));
      layer.rows.push_back(static_cast<int64_t>(random.next_below(60)));
    }
    SCOPED_TRACE(fmt::format("round {}", round));
    expect_agreement(layer, 200 + static_cast<uint64_t>(round));
  }
}

}  // namespace
}  // namespace tessera
