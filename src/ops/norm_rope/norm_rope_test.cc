#include "ops/norm_rope/norm_rope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/addend_check.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

constexpr double kEps = 1e-5;

KernelTable kernels() {
  KernelTable table;
  add_norm_rope_cpu(table);
  add_rmsnorm_cpu(table);
  add_rope_cpu(table);
  return table;
}

RotarySpec rotary(int64_t heads, int64_t size, int64_t offset, int64_t rotated, bool interleaved) {
  return {.num_heads = heads,
          .head_size = size,
          .offset = offset,
          .interleaved = interleaved,
          .inverse_frequencies = default_inverse_frequencies(rotated, 100),
          .amplitude = 1.25F};
}

std::vector<RotarySpec> specs() {
  return {rotary(1, 2, 0, 2, false), rotary(3, 16, 0, 16, false), rotary(2, 40, 8, 16, true),
          rotary(5, 21, 3, 6, false), rotary(4, 128, 0, 64, false)};
}

std::vector<TestInput> make_inputs(const RotarySpec& spec, int64_t tokens, DType dtype,
                                   Random& random) {
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < tokens; ++t) positions.push_back(static_cast<int32_t>(7 * t % 50));
  return list_inputs(
      TestInput{random_tensor(dtype, {tokens, spec.num_heads * spec.head_size}, random),
                Role::kValue, "x"},
      TestInput{random_tensor(DType::kF32, {spec.head_size}, random), Role::kWeight, "weight"},
      TestInput{tensor_of_i32({tokens}, positions), Role::kConstant, "positions"});
}

OwnedTensor copy_of(const Tensor& from) {
  OwnedTensor to(from.dtype, from.shape);
  std::copy_n(static_cast<const std::byte*>(from.data), from.num_bytes(),
              static_cast<std::byte*>(to.get().data));
  return to;
}

TestInput input(const Tensor& from, const char* name) {
  return {copy_of(from), Role::kConstant, name};
}

/// Both directions in F32 by the two operators that it stands for.
struct Plain {
  std::vector<OwnedTensor> normed;  // y, rstd
  std::vector<OwnedTensor> turned;
  std::vector<OwnedTensor> grads;  // of x, of the weight

  Plain(const RotarySpec& spec, const std::vector<TestInput>& in, const Tensor& grad) {
    normed = run_operator(*make_rmsnorm(kEps), kernels(),
                          list_inputs(input(in[0].tensor, "x"), input(in[1].tensor, "weight")));
    turned = run_operator(*make_rope(spec), kernels(),
                          list_inputs(input(normed[0], "x"), input(in[2].tensor, "positions")));
    const auto back = run_operator(Rope(spec, true), kernels(),
                                   list_inputs(input(grad, "x"), input(in[2].tensor, "p")));
    grads = run_operator(RmsNormBackward(), kernels(),
                         list_inputs(input(in[0].tensor, "x"), input(in[1].tensor, "weight"),
                                     input(normed[1], "rstd"), input(back[0], "grad")));
  }
};

TEST(NormRope, IsTheNormThenTheRotation) {
  for (const RotarySpec& spec : specs()) {
    for (const int64_t tokens : {0, 1, 37}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(fmt::format("{} x {} heads of {} {}", tokens, spec.num_heads, spec.head_size,
                                 dtype_name(dtype)));
        Random random(5, static_cast<uint64_t>(tokens));
        const auto inputs = make_inputs(spec, tokens, dtype, random);
        const auto grad = list_inputs(
            TestInput{random_tensor(dtype, {tokens, spec.num_heads * spec.head_size}, random),
                      Role::kConstant, "grad"});
        const Plain plain(spec, widened(inputs), widened(grad)[0].tensor);
        const auto outputs = run_operator(*make_norm_rope(kEps, spec), kernels(), inputs);
        const auto grads = run_operator(
            NormRopeBackward(spec), kernels(),
            list_inputs(input(inputs[0].tensor, "x"), input(inputs[1].tensor, "weight"),
                        input(inputs[2].tensor, "positions"), input(outputs[1], "rstd"),
                        input(grad[0].tensor, "grad")));
        expect_bitwise_equal(outputs[1], plain.normed[1], "rstd");
        const bool exact = dtype == DType::kF32;
        if (exact) expect_bitwise_equal(outputs[0], plain.turned[0], "y");
        if (exact) expect_bitwise_equal(grads[0], plain.grads[0], "grad x");
        // BF16 is rounded once.
        expect_rows_near(outputs[0], plain.turned[0], 4e-3, "y");
        expect_rows_near(grads[0], plain.grads[0], 4e-3, "grad x");
        expect_rows_near(grads[1], plain.grads[1], 1e-5, "grad weight");
      }
    }
  }
}

TEST(NormRope, GradientsAgainstFiniteDifferences) {
  Random random(6, 1);
  for (const RotarySpec& spec : {rotary(3, 16, 0, 16, false), rotary(2, 12, 2, 6, true)})
    check_gradients(make_norm_rope(kEps, spec), kernels(),
                    make_inputs(spec, 5, DType::kF32, random), {.outputs = {0}});
}

TEST(NormRope, RefusesWhatDoesNotFit) {
  const RotarySpec spec = rotary(2, 16, 0, 16, false);
  const auto refuses = [&](const std::vector<ValueType>& types, const char* message) {
    EXPECT_THAT([&] { make_norm_rope(kEps, spec)->infer(types); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  const ValueType x{DType::kBF16, {4, 32}};
  const ValueType weight{DType::kF32, {16}};
  const ValueType positions{DType::kI32, {4}};
  refuses({x, weight}, "norm_rope: takes x, weight and positions, got 2");
  refuses({x, {DType::kF32, {32}}, positions}, "norm_rope: the weight must be f32 [16]");
  refuses({{DType::kBF16, {4, 48}}, weight, positions}, "2 heads of 16 need rows of 32");
  EXPECT_THAT([] { make_norm_rope(kEps, rotary(1, 1040, 0, 16, false)); },
              ::testing::ThrowsMessage<UserError>(::testing::HasSubstr("heads of 1040")));
}

}  // namespace
}  // namespace tessera::testing
