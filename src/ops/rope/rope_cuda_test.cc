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
  void check_two(const RotarySpec& spec, int64_t second_heads, int64_t tokens,
                 testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} tokens, {} and {} heads of {}", tokens, spec.num_heads,
                             second_heads, spec.head_size));
    const OwnedTensor at = positions(tokens);
    how.values = {{"positions", at}};
    testing::check_operator_on_gpu(
        make_rope(spec, second_heads),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "x second", "positions"},
                  {{dtype, {tokens, spec.num_heads * spec.head_size}},
                   {dtype, {tokens, second_heads * spec.head_size}},
                   {DType::kI32, {tokens}}}};
        },
        {0, 1}, cpu(), gpu(), how);
  }
  /// On the GPU, both at once against one after the other.
  static void check_bits(const RotarySpec& spec, int64_t second_heads, DType dtype) {
    constexpr int64_t kTokens = 129;
    Random random(31, second_heads);
    const OwnedTensor at = testing::copy_to(gpu(), positions(kTokens));
    const int64_t heads[] = {spec.num_heads, second_heads};
    std::vector<OwnedTensor> x, y;
    for (const int64_t count : heads) {
      const Shape shape = {kTokens, count * spec.head_size};
      x.push_back(testing::copy_to(gpu(), testing::random_tensor(dtype, shape, random)));
      y.emplace_back(dtype, shape, "both", gpu().device());
    }
    const Tensor inputs[] = {x[0], x[1], at};
    const Tensor outputs[] = {y[0], y[1]};
    testing::run_kernel(*make_rope(spec, second_heads), gpu(), inputs, outputs);
    for (int i = 0; i < 2; ++i) {
      RotarySpec own = spec;
      own.num_heads = heads[i];
      const OwnedTensor alone(dtype, x[i].get().shape, "alone", gpu().device());
      const Tensor from[] = {x[i], at};
      testing::run_kernel(*make_rope(own), gpu(), from, std::span(&alone.get(), 1));
      testing::expect_bitwise_equal(testing::copy_to_host(gpu(), y[i]),
                                    testing::copy_to_host(gpu(), alone), "turned");
    }
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

TEST_F(RopeCuda, TwoTensors) {
  for (const bool interleaved : {false, true}) {
    for (const auto& [heads, second_heads] :
         {std::pair{6, 2}, {4, 4}, {1, 1}, {3, 5}, {32, 8}, {17, 1}, {2, 40}}) {
      const RotarySpec spec = {.num_heads = heads,
                               .head_size = 64,
                               .interleaved = interleaved,
                               .inverse_frequencies = default_inverse_frequencies(64, 1e4)};
      for (const int64_t tokens : {0, 1, 35, 2048}) check_two(spec, second_heads, tokens);
    }
    const RotarySpec part = {.num_heads = 5,
                             .head_size = 40,
                             .offset = 8,
                             .interleaved = interleaved,
                             .inverse_frequencies = default_inverse_frequencies(16, 1e4),
                             .amplitude = 1.2F};
    check_two(part, 3, 70);
    const RotarySpec odd = {.num_heads = 3,
                            .head_size = 11,
                            .offset = 3,
                            .interleaved = interleaved,
                            .inverse_frequencies = default_inverse_frequencies(6, 1e4)};
    check_two(odd, 2, 70);
  }
}

TEST_F(RopeCuda, TwoTensorsHaveTheBitsOfEachAlone) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [heads, second_heads] : {std::pair{6, 2}, {32, 8}, {3, 16}, {1, 1}}) {
      SCOPED_TRACE(fmt::format("{} and {} heads of {}", heads, second_heads, dtype_name(dtype)));
      check_bits({.num_heads = heads,
                  .head_size = 64,
                  .inverse_frequencies = default_inverse_frequencies(64, 1e6)},
                 second_heads, dtype);
    }
  }
}

TEST_F(RopeCuda, TinyTwoTensors) {
  check_two({.num_heads = 3,
             .head_size = 40,
             .offset = 8,
             .inverse_frequencies = default_inverse_frequencies(16, 1e4)},
            2, 7, {.once = true});
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
    testing::check_ragged_operator_on_gpu(
        make_rope(spec, 3),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "x second", "positions"},
                  {testing::ragged_rows(dtype, {60, 128}), testing::ragged_rows(dtype, {60, 192}),
                   testing::ragged_rows(DType::kI32, {60})}};
        },
        {0, 1}, extent, cpu(), gpu(), {.values = {{"positions", at}}});
  }
}

}  // namespace
}  // namespace tessera
