#include "ops/norm_rope/norm_rope.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/narrow_gpu.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class NormRopeCuda : public testing::GpuTest {
 protected:
  /// Positions from 0 to 200,000, not in order.
  static OwnedTensor positions(int64_t count) {
    std::vector<int32_t> values;
    for (int64_t i = 0; i < count; ++i)
      values.push_back(static_cast<int32_t>((i * 7919) % (i % 2 == 0 ? 200 : 200'000)));
    return testing::tensor_of_i32({count}, values);
  }
  static RotarySpec rotary(int64_t heads, int64_t size, int64_t offset, int64_t rotated,
                           bool interleaved = false) {
    return {.num_heads = heads,
            .head_size = size,
            .offset = offset,
            .interleaved = interleaved,
            .inverse_frequencies = default_inverse_frequencies(rotated, 1e6),
            .amplitude = 1.2F};
  }
  void check(const RotarySpec& spec, int64_t tokens) const { check_on(gpu(), spec, tokens); }
  void check_on(const Backend& on, const RotarySpec& spec, int64_t tokens,
                testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} tokens, {} heads of {}, {} from {}", tokens, spec.num_heads,
                             spec.head_size, spec.rotary_dim(), spec.offset));
    const OwnedTensor at = positions(tokens);
    how.values = {{"positions", at}};
    testing::check_operator_on_gpu(
        make_norm_rope(1e-5, spec),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "w", "positions"},
                  {{dtype, {tokens, spec.num_heads * spec.head_size}},
                   {DType::kF32, {spec.head_size}},
                   {DType::kI32, {tokens}}}};
        },
        {0}, cpu(), on, how);
  }
};

TEST_F(NormRopeCuda, FusedHeads) {
  for (const int64_t size : {32, 64, 128, 256})
    for (const int64_t heads : {1, 4, 6, 9, 32})
      for (const int64_t tokens : {0, 1, 45}) check(rotary(heads, size, 0, size), tokens);
  check(rotary(32, 128, 0, 128), 3000);
  check(rotary(3, 64, 0, 64), 9001);
}

TEST_F(NormRopeCuda, PartsOfHeads) {
  check(rotary(5, 128, 0, 64), 70);
  check(rotary(3, 128, 32, 48), 70);
  check(rotary(3, 64, 48, 16), 33);
}

TEST_F(NormRopeCuda, HeadsThatGoByScratchMemory) {
  check(rotary(4, 128, 0, 128, true), 40);
  check(rotary(4, 96, 0, 96), 40);
  check(rotary(3, 11, 3, 6), 70);
  check(rotary(2, 1024, 0, 1024), 3);
}

TEST_F(NormRopeCuda, RaggedRows) {
  const OwnedTensor at = positions(60);
  for (const int64_t size : {64, 40}) {
    for (const int64_t extent : {0, 1, 41}) {
      testing::check_ragged_operator_on_gpu(
          make_norm_rope(1e-5, rotary(2, size, 0, 16)),
          [&](DType dtype) -> testing::OperatorInputs {
            ValueType rows = testing::ragged_rows(dtype, {60, 2 * size});
            return {{"x", "w", "positions"}, {rows, {DType::kF32, {size}}, {DType::kI32, {60}}}};
          },
          {0}, extent, cpu(), gpu(), {.values = {{"positions", at}}});
    }
  }
}

/// With and without a table of angles; blocks take several items in turn.
TEST_F(NormRopeCuda, TinyHeads) {
  check_on(testing::make_narrow_gpu(), rotary(3, 64, 0, 64), 130, {.once = true});
}

TEST_F(NormRopeCuda, TinyTable) {
  check_on(testing::make_narrow_gpu(), rotary(17, 128, 0, 64), 15, {.once = true});
}

TEST_F(NormRopeCuda, TinyHeadsThatGoByScratchMemory) {
  check_on(testing::make_narrow_gpu(), rotary(3, 40, 8, 16), 29, {.once = true});
}

}  // namespace
}  // namespace tessera
