#include "ops/layer_norm/layer_norm.h"

#include <array>

#include "ops/testing/addend_gpu_check.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/narrow_gpu.h"

namespace tessera {
namespace {

testing::OperatorInputs norm_inputs(DType dtype, int64_t tokens, int64_t size) {
  return {{"x", "weight", "wbias"},
          {{dtype, {tokens, size}}, {DType::kF32, {size}}, {DType::kF32, {size}}}};
}

class LayerNormCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t size) const {
    check_on(gpu(), tokens, size, {.seed = static_cast<uint64_t>(tokens + size)});
  }
  void check_on(const Backend& on, int64_t tokens, int64_t size,
                const testing::GpuCheck& how) const {
    SCOPED_TRACE(fmt::format("{} x {}", tokens, size));
    testing::check_operator_on_gpu(
        make_layer_norm(1e-5), [&](DType dtype) { return norm_inputs(dtype, tokens, size); }, {0},
        cpu(), on, how);
  }
};

TEST_F(LayerNormCuda, Shapes) {
  for (const int64_t size : {5, 64, 128, 131, 264, 2048, 4096}) {
    for (const int64_t tokens : {1, 3, 37}) check(tokens, size);
  }
  check(0, 64);
  check(9001, 512);
  check(1701, 4096);
  check(5, 16392);
}

TEST_F(LayerNormCuda, BackwardAddsAnAddend) {
  for (const auto& sizes : {std::array<int64_t, 2>{0, 64}, {1, 7}, {45, 264}, {601, 4096}}) {
    const int64_t tokens = sizes[0];
    const int64_t size = sizes[1];
    SCOPED_TRACE(fmt::format("{} x {}", tokens, size));
    testing::check_addend_on_gpu(
        LayerNormBackward(1e-5),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "weight", "grad"},
                  {{dtype, {tokens, size}}, {DType::kF32, {size}}, {dtype, {tokens, size}}}};
        },
        cpu(), gpu());
  }
}

TEST_F(LayerNormCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 29, 64}) {
    testing::check_ragged_operator_on_gpu(
        make_layer_norm(1e-6),
        [&](DType dtype) -> testing::OperatorInputs {
          return {
              {"x", "weight", "wbias"},
              {testing::ragged_rows(dtype, {64, 256}), {DType::kF32, {256}}, {DType::kF32, {256}}}};
        },
        {0}, extent, cpu(), gpu());
  }
}

TEST_F(LayerNormCuda, TinyRows) {
  check_on(testing::make_narrow_gpu(), 61, 520, {.once = true});
}

TEST_F(LayerNormCuda, TinyRowsWithAddend) {
  testing::check_addend_on_gpu(LayerNormBackward(1e-5),
                               [](DType dtype) -> testing::OperatorInputs {
                                 return {
                                     {"x", "weight", "grad"},
                                     {{dtype, {61, 72}}, {DType::kF32, {72}}, {dtype, {61, 72}}}};
                               },
                               cpu(), testing::make_narrow_gpu(), {.once = true});
}

}  // namespace
}  // namespace tessera
