#include "ops/latent_heads/latent_heads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_latent_heads_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const LatentHeadsSpec& s, int64_t tokens, DType dtype,
                                   uint64_t seed) {
  Random random(seed, 1);
  return list_inputs(
      TestInput{random_tensor(dtype, {tokens, s.num_heads * (s.nope_size + s.value_size)}, random),
                Role::kValue, "kv"},
      TestInput{random_tensor(dtype, {tokens, s.rope_size}, random), Role::kValue, "shared"});
}

constexpr LatentHeadsSpec kSpecs[] = {
    {.num_heads = 1, .nope_size = 1, .rope_size = 1, .value_size = 1},
    {.num_heads = 3, .nope_size = 5, .rope_size = 2, .value_size = 7},
    {.num_heads = 4, .nope_size = 16, .rope_size = 18, .value_size = 33},
};

/// Element i of head n of token t of the keys.
double key_of(const LatentHeadsSpec& s, const std::vector<double>& kv,
              const std::vector<double>& shared, int64_t t, int64_t n, int64_t i) {
  const int64_t width = s.nope_size + s.value_size;
  return i < s.nope_size ? kv[(t * s.num_heads + n) * width + i]
                         : shared[t * s.rope_size + i - s.nope_size];
}

void check_forward(const LatentHeadsSpec& s, int64_t tokens, DType dtype) {
  const auto inputs = make_inputs(s, tokens, dtype, 5);
  const auto outputs = run_operator(*make_latent_heads(s), kernels(), inputs);
  const auto kv = to_doubles(inputs[0].tensor);
  const auto shared = to_doubles(inputs[1].tensor);
  const auto keys = to_doubles(outputs[0]);
  const auto values = to_doubles(outputs[1]);
  size_t key_at = 0;
  size_t value_at = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t n = 0; n < s.num_heads; ++n) {
      for (int64_t i = 0; i < s.key_size(); ++i)
        ASSERT_EQ(keys[key_at++], key_of(s, kv, shared, t, n, i)) << t << " " << n << " " << i;
      const int64_t row = (t * s.num_heads + n) * (s.nope_size + s.value_size) + s.nope_size;
      for (int64_t i = 0; i < s.value_size; ++i)
        ASSERT_EQ(values[value_at++], kv[row + i]) << t << " " << n;
    }
  }
}

TEST(LatentHeads, PutsEachElementInItsPlace) {
  for (const LatentHeadsSpec& spec : kSpecs) {
    for (const int64_t tokens : {0, 1, 7}) {
      check_forward(spec, tokens, DType::kF32);
      check_forward(spec, tokens, DType::kBF16);
    }
  }
}

TEST(LatentHeads, GradientsAgainstFiniteDifferences) {
  for (const LatentHeadsSpec& spec : kSpecs) {
    check_gradients(make_latent_heads(spec), kernels(), make_inputs(spec, 3, DType::kF32, 6));
  }
}

TEST(LatentHeads, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_latent_heads({.num_heads = 2, .nope_size = 4, .rope_size = 0}), UserError);
  const auto refuses = [](const std::vector<ValueType>& types, const char* message) {
    EXPECT_THAT([&] { make_latent_heads(kSpecs[1])->infer(types); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({{DType::kF32, {4, 35}}, {DType::kF32, {4, 2}}}, "rows of 36");
  refuses({{DType::kF32, {4, 36}}, {DType::kF32, {5, 2}}}, "second input must be f32 [4, 2]");
  refuses({{DType::kF32, {4, 36}}, {DType::kBF16, {4, 2}}}, "second input must be f32 [4, 2]");
  refuses({{DType::kI32, {4, 36}}, {DType::kF32, {4, 2}}}, "first input must be f32 or bf16");
}

}  // namespace
}  // namespace tessera::testing
