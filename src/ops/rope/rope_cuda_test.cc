#include "ops/rope/rope.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class RopeCuda : public testing::GpuTest {
 protected:
  /// Positions from 0 to 200,000, not in order.
  static OwnedTensor positions(int64_t count) {
    std::vector<int32_t> values;
    for (int64_t i = 0; i < count; ++i)
      values.push_back(static_cast<int32_t>((i * 7919) % (i % 2 == 0 ? 200 : 200'000)));
    return testing::tensor_of_i32({count}, values);
  }
  void check(const RotarySpec& spec, int64_t tokens, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} tokens, {} heads of {}, {} from {}", tokens, spec.num_heads,
                             spec.head_size, spec.rotary_dim(), spec.offset));
    const OwnedTensor at = positions(tokens);
    how.values = {{"positions", at}};
    testing::check_operator_on_gpu(
        make_rope(spec),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "positions"},
                  {{dtype, {tokens, spec.num_heads * spec.head_size}}, {DType::kI32, {tokens}}}};
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(RopeCuda, Heads) {
  for (const bool interleaved : {false, true}) {
    for (const int64_t tokens : {0, 1, 33}) {
      check({.num_heads = 4,
             .head_size = 128,
             .interleaved = interleaved,
             .inverse_frequencies = default_inverse_frequencies(128, 1e6)},
            tokens);
    }
  }
}

TEST_F(RopeCuda, PartsOfHeads) {
  for (const bool interleaved : {false, true}) {
    check({.num_heads = 5,
           .head_size = 192,
           .offset = 128,
           .interleaved = interleaved,
           .inverse_frequencies = default_inverse_frequencies(64, 1e4),
           .amplitude = 1.2F},
          40);
    check({.num_heads = 9,
           .head_size = 40,
           .offset = 8,
           .interleaved = interleaved,
           .inverse_frequencies = default_inverse_frequencies(16, 1e4)},
          11);
    check({.num_heads = 3,
           .head_size = 11,
           .offset = 3,
           .interleaved = interleaved,
           .inverse_frequencies = default_inverse_frequencies(6, 1e4)},
          70);
    check({.num_heads = 1,
           .head_size = 1024,
           .interleaved = interleaved,
           .inverse_frequencies = default_inverse_frequencies(1024, 1e4)},
          3);
  }
}

TEST_F(RopeCuda, TinyHeads) {
  check({.num_heads = 5,
         .head_size = 40,
         .offset = 8,
         .inverse_frequencies = default_inverse_frequencies(16, 1e4)},
        7, {.once = true});
}

TEST_F(RopeCuda, RaggedRows) {
  const OwnedTensor at = positions(60);
  const RotarySpec spec = {
      .num_heads = 2, .head_size = 64, .inverse_frequencies = default_inverse_frequencies(64, 1e4)};
  for (const int64_t extent : {0, 1, 41}) {
    testing::check_ragged_operator_on_gpu(
        make_rope(spec),
        [&](DType dtype) -> testing::OperatorInputs {
          return {
              {"x", "positions"},
              {testing::ragged_rows(dtype, {60, 128}), testing::ragged_rows(DType::kI32, {60})}};
        },
        {0}, extent, cpu(), gpu(), {.values = {{"positions", at}}});
  }
}

}  // namespace
}  // namespace tessera
