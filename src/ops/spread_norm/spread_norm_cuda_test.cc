#include "ops/spread_norm/spread_norm.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/narrow_gpu.h"

namespace tessera {
namespace {

class SpreadNormCuda : public testing::GpuTest {
 protected:
  static std::vector<Shape> shapes() {
    return {{0, 8}, {1, 1}, {3, 7}, {130, 64}, {300, 100}, {5000, 40}, {33, 9000}, {65, 2048}};
  }
  void check_square_sums(const Shape& shape, const Backend& on,
                         const testing::GpuCheck& how = {}) const {
    SCOPED_TRACE(shape.to_string());
    testing::check_operator_on_gpu(
        make_square_sums(),
        [&](DType dtype) {
          return testing::OperatorInputs{.names = {"x"}, .types = {{dtype, shape}}};
        },
        {0}, cpu(), on, how);
  }
  // A large eps makes up for square sums that are negative: random, and not those of x.
  void check_norm(const Shape& shape, const Backend& on, const testing::GpuCheck& how = {}) const {
    SCOPED_TRACE(shape.to_string());
    testing::check_operator_on_gpu(
        make_spread_norm({.num_elements = 2 * shape[1], .eps = 8}),
        [&](DType dtype) {
          return testing::OperatorInputs{
              .names = {"x", "w", "x_sums"},
              .types = {{dtype, shape}, {DType::kF32, {shape[1]}}, {DType::kF32, {shape[0]}}}};
        },
        {0}, cpu(), on, how);
  }
};

TEST_F(SpreadNormCuda, SquareSums) {
  for (const Shape& shape : shapes()) check_square_sums(shape, gpu());
}

TEST_F(SpreadNormCuda, Norm) {
  for (const Shape& shape : shapes()) check_norm(shape, gpu());
}

TEST_F(SpreadNormCuda, TinyShape) {
  const Backend narrow = testing::make_narrow_gpu();
  check_square_sums({37, 72}, narrow, {.once = true});
  check_norm({37, 72}, narrow, {.once = true});
}

}  // namespace
}  // namespace tessera
