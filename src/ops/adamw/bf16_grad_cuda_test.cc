#include "ops/adamw/bf16_grad_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class AdamWBf16GradientsCuda : public testing::GpuTest {};

TEST_F(AdamWBf16GradientsCuda, UpdateAsTheSameNumbersInF32) {
  std::vector<Shape> shapes = testing::bf16_gradient_shapes();
  shapes.insert(shapes.end(), {{300, 1024}, {1000, 1001}});
  for (const AdamWSpec& spec : testing::list_adamw_specs())
    testing::check_bf16_gradients(spec, shapes, gpu());
}

/// More slices than a launch takes.
TEST_F(AdamWBf16GradientsCuda, ManySlices) {
  std::vector<Shape> shapes;
  for (int64_t i = 0; i < 150; ++i) shapes.push_back({1 + i % 7, 1 + 37 * (i % 11)});
  for (const AdamWSpec& spec : testing::list_adamw_specs())
    testing::check_bf16_gradients(spec, shapes, gpu());
}

TEST_F(AdamWBf16GradientsCuda, TinySlices) {
  for (const MomentKind kind : {MomentKind::kF32, MomentKind::kFp8})
    testing::check_bf16_gradients({.bf16_weight = true, .formats = {kind, kind}},
                                  {{3, 130}, {2, 8}}, gpu());
}

}  // namespace
}  // namespace tessera
