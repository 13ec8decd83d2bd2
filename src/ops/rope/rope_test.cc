#include "ops/rope/rope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_rope_cpu(table);
  return table;
}

RotarySpec make_spec(int64_t heads, int64_t head_size, int64_t rotary_dim, float amplitude = 1.0F) {
  return {.num_heads = heads,
          .head_size = head_size,
          .inverse_frequencies = default_inverse_frequencies(rotary_dim, 10000.0),
          .amplitude = amplitude};
}

std::vector<TestInput> make_inputs(const RotarySpec& spec, const std::vector<int32_t>& positions,
                                   DType dtype, Random& random) {
  const auto tokens = static_cast<int64_t>(positions.size());
  std::vector<TestInput> inputs;
  inputs.push_back(
      {random_tensor(dtype, {tokens, spec.num_heads * spec.head_size}, random), Role::kValue, "x"});
  inputs.push_back({tensor_of_i32({tokens}, positions), Role::kConstant, "positions"});
  return inputs;
}

/// The element that one turns with, by its place in the rotated part, and whether it is the first
/// of the pair.
struct Partner {
  size_t at;
  size_t pair;
  bool first;
};

Partner partner_of(size_t at, size_t dim, bool interleaved) {
  if (interleaved) return {at ^ 1U, at / 2, at % 2 == 0};
  const bool first = at < dim / 2;
  return {first ? at + dim / 2 : at - dim / 2, at % (dim / 2), first};
}

/// x · cos + rotate_half(x) · sin as Hugging Face's apply_rotary_pos_emb writes it, or the complex
/// product of DeepSeek-V2's apply_rotary_emb for neighbours.
std::vector<float> reference(const RotarySpec& spec, const std::vector<double>& x,
                             const std::vector<int32_t>& positions, double direction) {
  const size_t dim = spec.rotary_dim();
  const size_t head_size = spec.head_size;
  std::vector<float> result;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t in_head = i % head_size;
    const size_t offset = spec.offset;
    if (in_head < offset || in_head >= offset + dim) {
      result.push_back(static_cast<float>(x[i]));
      continue;
    }
    const Partner partner = partner_of(in_head - offset, dim, spec.interleaved);
    const size_t token = i / (head_size * static_cast<size_t>(spec.num_heads));
    const float angle =
        spec.inverse_frequencies[partner.pair] * static_cast<float>(positions[token]);
    const double other = x[i - in_head + offset + partner.at];
    const double half = partner.first ? -other : other;
    const double turned = x[i] * std::cos(static_cast<double>(angle)) +
                          direction * half * std::sin(static_cast<double>(angle));
    result.push_back(static_cast<float>(spec.amplitude * turned));
  }
  return result;
}

void check_case(const RotarySpec& spec, const std::vector<int32_t>& positions, DType dtype) {
  SCOPED_TRACE(fmt::format("{} heads of {}, rotary {}, {} tokens, {}", spec.num_heads,
                           spec.head_size, spec.rotary_dim(), positions.size(), dtype_name(dtype)));
  Random random(21, positions.size());
  const auto inputs = make_inputs(spec, positions, dtype, random);
  const Shape shape = inputs[0].tensor.get().shape;
  const double tolerance = dtype == DType::kF32 ? 5e-7 : 4e-3;
  const auto outputs = run_operator(*make_rope(spec), kernels(), inputs);
  const auto expected = reference(spec, to_doubles(inputs[0].tensor), positions, 1.0);
  expect_rows_near(outputs[0], tensor_of(shape, expected), tolerance, "y");

  std::vector<OwnedTensor> grad;
  grad.push_back(random_tensor(dtype, shape, random));
  const auto grads = run_gradients(make_rope(spec), kernels(), inputs, grad);
  const auto expected_grad = reference(spec, to_doubles(grad[0]), positions, -1.0);
  expect_rows_near(grads[0], tensor_of(shape, expected_grad), tolerance, "grad x");
}

TEST(Rope, MatchesHuggingFacesFormula) {
  const std::vector<int32_t> positions = {0, 1, 2, 511, 4095, 131071, 7, 0};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    check_case(make_spec(2, 64, 64), positions, dtype);
    check_case(make_spec(3, 6, 6), positions, dtype);
    check_case(make_spec(1, 2, 2), {5}, dtype);
    check_case(make_spec(2, 80, 36, 1.25F), positions, dtype);
    check_case(make_spec(2, 7, 4), positions, dtype);
    check_case(make_spec(2, 64, 64), {}, dtype);
  }
}

TEST(Rope, RotatesNeighboursAndPartsOfAHead) {
  const std::vector<int32_t> positions = {0, 1, 2, 511, 4095};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool interleaved : {false, true}) {
      RotarySpec spec = make_spec(3, 24, 8, 1.1F);
      spec.interleaved = interleaved;
      for (spec.offset = 0; spec.offset <= 16; spec.offset += 8) check_case(spec, positions, dtype);
      RotarySpec wide = make_spec(2, 70, 70);
      wide.interleaved = interleaved;
      check_case(wide, positions, dtype);
    }
  }
}

/// Two tensors, the second of `second_heads` heads, and their positions.
std::vector<TestInput> make_two(const RotarySpec& spec, int64_t second_heads,
                                const std::vector<int32_t>& positions, DType dtype,
                                Random& random) {
  auto inputs = make_inputs(spec, positions, dtype, random);
  const auto tokens = static_cast<int64_t>(positions.size());
  const Shape shape = {tokens, second_heads * spec.head_size};
  inputs.insert(inputs.begin() + 1,
                {random_tensor(dtype, shape, random), Role::kValue, "second x"});
  return inputs;
}

OwnedTensor copy_of(const Tensor& tensor) {
  OwnedTensor copy(tensor.dtype, tensor.shape);
  std::memcpy(copy.get().data, tensor.data, tensor.num_bytes());
  return copy;
}

std::vector<OwnedTensor> one_gradient(const Tensor& gradient) {
  std::vector<OwnedTensor> given;
  given.push_back(copy_of(gradient));
  return given;
}

/// One of the two with the same positions.
std::vector<TestInput> one_of(const std::vector<TestInput>& two, size_t idx) {
  return list_inputs(TestInput{copy_of(two[idx].tensor), Role::kValue, "x"},
                     TestInput{copy_of(two[2].tensor), Role::kConstant, "positions"});
}

TEST(Rope, TwoTensorsTurnAsEachAlone) {
  const std::vector<int32_t> positions = {0, 1, 2, 511, 4095, 131071, 7, 0};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t second_heads : {1, 2, 5}) {
      SCOPED_TRACE(fmt::format("{} heads, {}", second_heads, dtype_name(dtype)));
      Random random(24, second_heads);
      const RotarySpec specs[] = {make_spec(3, 24, 16, 1.1F),
                                  make_spec(second_heads, 24, 16, 1.1F)};
      const auto inputs = make_two(specs[0], second_heads, positions, dtype, random);
      const OperatorPtr both = make_rope(specs[0], second_heads);
      const auto outputs = run_operator(*both, kernels(), inputs);
      std::vector<OwnedTensor> given;
      for (int i = 0; i < 2; ++i)
        given.push_back(random_tensor(dtype, inputs[i].tensor.get().shape, random));
      const auto grads = run_gradients(both, kernels(), inputs, given);
      for (int i = 0; i < 2; ++i) {
        const auto alone = one_of(inputs, i);
        const OperatorPtr rope = make_rope(specs[i]);
        expect_bitwise_equal(outputs[i], run_operator(*rope, kernels(), alone)[0], "y");
        const auto own = run_gradients(rope, kernels(), alone, one_gradient(given[i]));
        expect_bitwise_equal(grads[i], own[0], "gradient");
      }
    }
  }
}

TEST(Rope, OneOfTwoTensorsMayHaveNoGradient) {
  Random random(25, 1);
  const RotarySpec specs[] = {make_spec(3, 8, 6), make_spec(2, 8, 6)};
  for (int i = 0; i < 2; ++i) {
    auto inputs = make_two(specs[0], 2, {0, 3, 100}, DType::kF32, random);
    inputs[1 - i].role = Role::kConstant;
    std::vector<OwnedTensor> given(2);
    given[i] = random_tensor(DType::kF32, inputs[i].tensor.get().shape, random);
    const auto grads = run_gradients(make_rope(specs[0], 2), kernels(), inputs, given);
    const auto own =
        run_gradients(make_rope(specs[i]), kernels(), one_of(inputs, i), one_gradient(given[i]));
    expect_bitwise_equal(grads[i], own[0], "gradient");
  }
}

TEST(Rope, PositionZeroIsTheIdentity) {
  Random random(22, 1);
  const RotarySpec spec = make_spec(2, 16, 16);
  const auto inputs = make_inputs(spec, {0, 0}, DType::kF32, random);
  const auto outputs = run_operator(*make_rope(spec), kernels(), inputs);
  expect_bitwise_equal(outputs[0], inputs[0].tensor, "at position 0");
}

TEST(Rope, GradientsAgainstFiniteDifferences) {
  Random random(23, 1);
  const RotarySpec spec = make_spec(2, 10, 6, 0.8F);
  check_gradients(make_rope(spec), kernels(), make_inputs(spec, {0, 3, 100}, DType::kF32, random));
  check_gradients(make_rope(spec, 3), kernels(),
                  make_two(spec, 3, {0, 3, 100}, DType::kF32, random));
}

TEST(Rope, DefaultFrequencies) {
  const auto frequencies = default_inverse_frequencies(4, 10000.0);
  EXPECT_THAT(frequencies, ::testing::ElementsAre(1.0F, 0.01F));
  EXPECT_THROW(default_inverse_frequencies(5, 10000.0), UserError);
  EXPECT_THROW(default_inverse_frequencies(0, 10000.0), UserError);
  EXPECT_THROW(default_inverse_frequencies(4, 0.0), UserError);
}

TEST(Rope, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_rope(make_spec(1, 4, 6)), UserError);
  EXPECT_THROW(make_rope(make_spec(0, 8, 8)), UserError);
  EXPECT_THROW(make_rope(make_spec(1, 4096, 2048)), UserError);
  EXPECT_THROW(make_rope(make_spec(1, 8, 8), -1), UserError);
  EXPECT_THROW(make_rope({.num_heads = 1, .head_size = 8, .inverse_frequencies = {}}), UserError);
  RotarySpec beyond = make_spec(1, 8, 6);
  beyond.offset = 4;
  EXPECT_THROW(make_rope(beyond), UserError);
  const auto refuses = [](const std::vector<ValueType>& types, const char* message,
                          int64_t second_heads = 0) {
    EXPECT_THAT([&] { make_rope(make_spec(2, 8, 8), second_heads)->infer(types); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  const ValueType x{DType::kF32, {4, 16}};
  const ValueType positions{DType::kI32, {4}};
  refuses({with_last_dim(x, 24), positions}, "rope: 2 heads of 8 need rows of 16");
  refuses({x, with_dtype(positions, DType::kI64)}, "rope: positions must be i32 [4]");
  refuses({x, {DType::kI32, {5}}}, "rope: positions must be i32 [4], got i32 [5]");
  refuses({x, positions}, "rope: takes 3 inputs, got 2", 1);
  refuses({x, x, positions}, "rope: 1 heads of 8 need rows of 8", 1);
  refuses({x, {DType::kBF16, {4, 8}}, positions}, "rope: both tensors must have the same type", 1);
  refuses({x, {DType::kF32, {3, 8}}, positions}, "rope: both tensors must have the same type", 1);
}

}  // namespace
}  // namespace tessera::testing
