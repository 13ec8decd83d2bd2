#include "ops/spread_norm/spread_norm.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class SpreadNormCuda : public testing::GpuTest {
 protected:
  static std::vector<Shape> shapes() {
    return {{0, 8}, {1, 1}, {3, 7}, {130, 64}, {300, 100}, {5000, 40}, {33, 9000}, {65, 2048}};
  }
};

TEST_F(SpreadNormCuda, SquareSums) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(shape.to_string());
    testing::check_operator_on_gpu(
        make_square_sums(),
        [&](DType dtype) {
          return testing::OperatorInputs{.names = {"x"}, .types = {{dtype, shape}}};
        },
        {0}, cpu(), gpu());
  }
}

// A large eps makes up for square sums that are negative: random, and not those of x.
TEST_F(SpreadNormCuda, Norm) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(shape.to_string());
    testing::check_operator_on_gpu(
        make_spread_norm({.num_elements = 2 * shape[1], .eps = 8}),
        [&](DType dtype) {
          return testing::OperatorInputs{
              .names = {"x", "w", "x_sums"},
              .types = {{dtype, shape}, {DType::kF32, {shape[1]}}, {DType::kF32, {shape[0]}}}};
        },
        {0}, cpu(), gpu());
  }
}

}  // namespace
}  // namespace tessera
