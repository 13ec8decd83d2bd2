#include "ops/gated_norm/gated_group_norm.h"

#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class GatedGroupNormCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t groups, int64_t size, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} x {} of {}", tokens, groups, size));
    how.tolerance_f32 = 1e-4;  // gradients are sums that may nearly vanish
    testing::check_operator_on_gpu(
        make_gated_group_norm({groups, 1e-2}),
        [&](DType dtype) -> testing::OperatorInputs {
          const ValueType rows{dtype, {tokens, groups * size}};
          return {{"x_x", "x_z", "w"}, {rows, rows, {DType::kF32, {groups * size}}}};
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(GatedGroupNormCuda, Shapes) {
  for (const auto& [tokens, groups, size] : {std::array<int64_t, 3>{0, 2, 64},
                                             {1, 1, 5},
                                             {9, 3, 17},
                                             {33, 2, 64},
                                             {70, 5, 128},
                                             {3, 1, 1}})
    check(tokens, groups, size);
}

TEST_F(GatedGroupNormCuda, LongGroups) {
  for (const int64_t size : {520, 1000, 2049, 8192}) check(21, 2, size);
}

TEST_F(GatedGroupNormCuda, ManyRows) {
  check(3000, 8, 512);
}

TEST_F(GatedGroupNormCuda, TinyShape) {
  check(5, 3, 64, {.once = true});
  check(3, 1, 35, {.once = true});
}

}  // namespace
}  // namespace tessera
