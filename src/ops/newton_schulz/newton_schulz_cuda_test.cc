#include "ops/newton_schulz/newton_schulz.h"

#include <cmath>
#include <cstring>

#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class NewtonSchulzCuda : public testing::GpuTest {
 protected:
  /// Of each matrix, over the norm of what the CPU makes of it.
  static void expect_near(const Tensor& actual, const Tensor& expected) {
    const auto values = testing::to_doubles(actual);
    const auto truths = testing::to_doubles(expected);
    const int64_t elements = expected.shape[1] * expected.shape[2];
    const double tolerance = expected.dtype == DType::kF32 ? 5e-4 : 4e-2;
    for (int64_t i = 0; i < expected.shape[0]; ++i) {
      double squares = 0;
      double error = 0;
      for (int64_t k = i * elements; k < (i + 1) * elements; ++k) {
        squares += truths[k] * truths[k];
        error += (values[k] - truths[k]) * (values[k] - truths[k]);
      }
      ASSERT_LE(std::sqrt(error), tolerance * std::sqrt(squares)) << "matrix " << i;
    }
  }

  /// Both apart and in place.
  void check(DType dtype, const Shape& shape, int64_t steps = 5) const {
    SCOPED_TRACE(fmt::format("{} {}, {} steps", dtype_name(dtype), shape.to_string(), steps));
    const OperatorPtr op = make_newton_schulz(steps);
    Random random(static_cast<uint64_t>(shape.num_elements()), 3);
    const OwnedTensor batch = testing::random_tensor(dtype, shape, random, 1e-3);
    const OwnedTensor expected(dtype, shape);
    testing::run_kernel(*op, cpu(), std::vector<Tensor>{batch}, std::vector<Tensor>{expected});
    const OwnedTensor in = testing::copy_to(gpu(), batch);
    const OwnedTensor out = testing::copy_to(gpu(), batch);
    testing::run_kernel(*op, gpu(), std::vector<Tensor>{in}, std::vector<Tensor>{out});
    const OwnedTensor result = testing::copy_to_host(gpu(), out);
    expect_near(result, expected);
    testing::run_kernel(*op, gpu(), std::vector<Tensor>{in}, std::vector<Tensor>{in});
    const OwnedTensor in_place = testing::copy_to_host(gpu(), in);
    if (result.get().num_bytes() == 0) return;
    EXPECT_EQ(std::memcmp(in_place.get().data, result.get().data,
                          static_cast<size_t>(result.get().num_bytes())),
              0);
  }
};

TEST_F(NewtonSchulzCuda, TinyBatch) {
  check(DType::kBF16, {2, 9, 20});
}

TEST_F(NewtonSchulzCuda, VectorsAndUnevenShapes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape :
         {Shape{3, 1, 33}, Shape{3, 33, 1}, Shape{5, 1, 1}, Shape{2, 129, 17}, Shape{2, 17, 129},
          Shape{3, 65, 65}, Shape{0, 4, 4}, Shape{2, 0, 4}, Shape{300, 8, 24}})
      check(dtype, shape);
  }
}

TEST_F(NewtonSchulzCuda, RandomShapes) {
  Random random(8, 0);
  for (int trial = 0; trial < 40; ++trial) {
    const auto size = [&] { return static_cast<int64_t>(1 + random.next_below(200)); };
    const Shape shape = {static_cast<int64_t>(1 + random.next_below(6)), size(), size()};
    check(trial % 2 == 0 ? DType::kF32 : DType::kBF16, shape,
          static_cast<int64_t>(1 + random.next_below(6)));
  }
}

TEST_F(NewtonSchulzCuda, MatricesOfExperts) {
  check(DType::kBF16, {4, 768, 2048});
  check(DType::kBF16, {4, 2048, 768});
}

}  // namespace
}  // namespace tessera
