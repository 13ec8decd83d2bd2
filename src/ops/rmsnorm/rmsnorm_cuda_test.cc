#include "ops/rmsnorm/rmsnorm.h"

#include <array>

#include "ops/testing/addend_gpu_check.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/narrow_gpu.h"

namespace tessera {
namespace {

class RmsNormCuda : public testing::GpuTest {
 protected:
  void check(const Shape& shape, int64_t weight_size, uint64_t seed) const {
    check_on(gpu(), shape, weight_size, {.seed = seed});
  }
  void check_on(const Backend& on, const Shape& shape, int64_t weight_size,
                const testing::GpuCheck& how) const {
    SCOPED_TRACE(fmt::format("{} weight {}", shape.to_string(), weight_size));
    testing::check_operator_on_gpu(
        make_rmsnorm(1e-5),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "w"}, {{dtype, shape}, {DType::kF32, {weight_size}}}};
        },
        {0}, cpu(), on, how);
  }
};

TEST_F(RmsNormCuda, WholeRows) {
  uint64_t seed = 1;
  for (const int64_t hidden : {1, 7, 8, 40, 128, 250, 264, 520, 1100, 2048, 7168})
    for (const int64_t rows : {1, 3, 45}) check({rows, hidden}, hidden, seed++);
  // Of which each block takes several, one after the other.
  for (const auto& [rows, hidden] :
       {std::array<int64_t, 2>{9001, 512}, {1701, 2048}, {700, 4096}, {301, 7168}})
    check({rows, hidden}, hidden, seed++);
  check({2, 0, 64}, 64, seed);
}

TEST_F(RmsNormCuda, RowsThatNoBlockHolds) {
  for (const int64_t hidden : {1031, 8200, 16392}) check({5, hidden}, hidden, 40);
}

TEST_F(RmsNormCuda, Heads) {
  check({70, 4 * 128}, 128, 50);
  check({33, 2, 3 * 64}, 64, 51);
  check({900, 5 * 96}, 96, 52);
  check({9, 6 * 33}, 33, 53);
  check({5, 2 * 1031}, 1031, 54);
}

TEST_F(RmsNormCuda, BackwardAddsAnAddend) {
  for (const auto& [rows, width, head] : {std::array<int64_t, 3>{0, 64, 64},
                                          {1, 7, 7},
                                          {45, 264, 264},
                                          {3, 2048, 2048},
                                          {1701, 2048, 2048},
                                          {601, 4096, 4096},
                                          {700, 4 * 128, 128},
                                          {5, 1031, 1031},
                                          {5, 16392, 16392}}) {
    SCOPED_TRACE(fmt::format("{} x {} by {}", rows, width, head));
    testing::check_addend_on_gpu(
        RmsNormBackward(),
        [&](DType dtype) -> testing::OperatorInputs {
          const Shape statistics = head == width ? Shape{rows} : Shape{rows, width / head};
          return {{"x", "weight", "rstd", "grad"},
                  {{dtype, {rows, width}},
                   {DType::kF32, {head}},
                   {DType::kF32, statistics},
                   {dtype, {rows, width}}}};
        },
        cpu(), gpu());
  }
}

TEST_F(RmsNormCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 29, 64}) {
    for (const int64_t head : {128, 256}) {
      testing::check_ragged_operator_on_gpu(
          make_rmsnorm(1e-6),
          [&](DType dtype) -> testing::OperatorInputs {
            return {{"x", "w"}, {testing::ragged_rows(dtype, {64, 256}), {DType::kF32, {head}}}};
          },
          {0}, extent, cpu(), gpu());
    }
  }
}

TEST_F(RmsNormCuda, TinyHeads) {
  check_on(testing::make_narrow_gpu(), {211, 2 * 72}, 72, {.once = true});
}

TEST_F(RmsNormCuda, TinyRows) {
  check_on(testing::make_narrow_gpu(), {61, 520}, 520, {.once = true});
}

TEST_F(RmsNormCuda, TinyRowsWithAddend) {
  testing::check_addend_on_gpu(
      RmsNormBackward(),
      [](DType dtype) -> testing::OperatorInputs {
        return {
            {"x", "weight", "rstd", "grad"},
            {{dtype, {61, 520}}, {DType::kF32, {520}}, {DType::kF32, {61}}, {dtype, {61, 520}}}};
      },
      cpu(), testing::make_narrow_gpu(), {.once = true});
}

TEST_F(RmsNormCuda, TinyRowsThatNoBlockHolds) {
  check_on(testing::make_narrow_gpu(), {6, 8200}, 8200, {.dtypes = {DType::kBF16}, .once = true});
}

}  // namespace
}  // namespace tessera
