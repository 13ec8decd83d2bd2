#include "ops/latent_cache/latent_cache.h"

#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::random_tensor;
using testing::Role;
using testing::TestInput;
using testing::to_doubles;

KernelTable kernels() {
  KernelTable table;
  add_latent_cache_cpu(table);
  return table;
}

/// Random rows and a weight.
struct Case {
  LatentCacheSpec spec;
  DType dtype;
  int64_t tokens;
  OwnedTensor rows, up;

  Case(const LatentCacheSpec& given, DType type, int64_t count, int64_t width)
      : spec(given), dtype(type), tokens(count) {
    Random random(4, static_cast<uint64_t>(count));
    rows = random_tensor(type, {count, width}, random);
    up = random_tensor(type, {spec.up_rows(), spec.rank}, random);
  }
  Tensor run(const OperatorPtr& op, std::vector<OwnedTensor>& outputs) {
    std::vector<TestInput> inputs;
    inputs.push_back({std::move(rows), Role::kConstant, "rows"});
    inputs.push_back({std::move(up), Role::kConstant, "up"});
    outputs = testing::run_operator(*op, kernels(), inputs);
    rows = std::move(inputs[0].tensor);
    up = std::move(inputs[1].tensor);
    return outputs[0];
  }
};

double tolerance(DType dtype) {
  return dtype == DType::kF32 ? 1e-5 : 1e-2;
}

const LatentCacheSpec kSpecs[] = {
    {.num_heads = 1, .nope_size = 1, .rope_size = 1, .value_size = 1, .rank = 1},
    {.num_heads = 3, .nope_size = 5, .rope_size = 2, .value_size = 7, .rank = 9},
    {.num_heads = 4, .nope_size = 16, .rope_size = 8, .value_size = 24, .rank = 40}};

TEST(LatentCache, QueriesMeetLatentsAsTheyDidKeys) {
  for (const LatentCacheSpec& s : kSpecs) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t tokens : {0, 1, 6}) {
        const int64_t head = s.nope_size + s.rope_size;
        Case x(s, dtype, tokens, s.num_heads * head);
        std::vector<OwnedTensor> outputs;
        const std::vector<double> found = to_doubles(x.run(make_latent_queries(s), outputs));
        const std::vector<double> q = to_doubles(x.rows);
        const std::vector<double> up = to_doubles(x.up);
        ASSERT_EQ(std::ssize(found), tokens * s.num_heads * (s.rank + s.rope_size));
        for (int64_t row = 0; row < tokens * s.num_heads; ++row) {
          const int64_t first = row % s.num_heads * (s.nope_size + s.value_size);
          for (int64_t r = 0; r < s.rank + s.rope_size; ++r) {
            double expected = r < s.rank ? 0 : q[row * head + s.nope_size + r - s.rank];
            for (int64_t i = 0; r < s.rank && i < s.nope_size; ++i)
              expected += q[row * head + i] * up[(first + i) * s.rank + r];
            EXPECT_NEAR(found[row * (s.rank + s.rope_size) + r], expected,
                        tolerance(dtype) * (1 + std::abs(expected)));
          }
        }
      }
    }
  }
}

TEST(LatentCache, ValuesAreMadeOfWhatWasAttendedTo) {
  for (const LatentCacheSpec& s : kSpecs) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t tokens : {0, 1, 6}) {
        Case x(s, dtype, tokens, s.num_heads * s.rank);
        std::vector<OwnedTensor> outputs;
        const std::vector<double> found = to_doubles(x.run(make_latent_outputs(s), outputs));
        const std::vector<double> attended = to_doubles(x.rows);
        const std::vector<double> up = to_doubles(x.up);
        ASSERT_EQ(std::ssize(found), tokens * s.num_heads * s.value_size);
        for (int64_t row = 0; row < tokens * s.num_heads; ++row) {
          const int64_t first = row % s.num_heads * (s.nope_size + s.value_size) + s.nope_size;
          for (int64_t i = 0; i < s.value_size; ++i) {
            double expected = 0;
            for (int64_t r = 0; r < s.rank; ++r)
              expected += attended[row * s.rank + r] * up[(first + i) * s.rank + r];
            EXPECT_NEAR(found[row * s.value_size + i], expected,
                        tolerance(dtype) * (1 + std::abs(expected)));
          }
        }
      }
    }
  }
}

TEST(LatentCache, KeysAreLatentsAndWhatHeadsShare) {
  Random random(4, 9);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<TestInput> inputs;
    inputs.push_back({random_tensor(dtype, {5, 7}, random), Role::kConstant, "latent"});
    inputs.push_back({random_tensor(dtype, {5, 3}, random), Role::kConstant, "shared"});
    const auto outputs = testing::run_operator(*make_latent_keys(), kernels(), inputs);
    const auto keys = to_doubles(outputs[0]);
    const auto latent = to_doubles(inputs[0].tensor);
    const auto shared = to_doubles(inputs[1].tensor);
    for (int64_t row = 0; row < 5; ++row) {
      for (int64_t i = 0; i < 10; ++i)
        EXPECT_EQ(keys[row * 10 + i], i < 7 ? latent[row * 7 + i] : shared[row * 3 + i - 7]);
    }
  }
}

TEST(LatentCache, RefusesShapesThatDoNotFit) {
  const LatentCacheSpec& s = kSpecs[1];
  const auto refused = [](const OperatorPtr& op, const std::vector<ValueType>& types) {
    EXPECT_THROW(op->infer(types), UserError);
  };
  const ValueType up{DType::kF32, {36, 9}};
  refused(make_latent_queries(s), {{DType::kF32, {2, 20}}, up});
  refused(make_latent_queries(s), {{DType::kBF16, {2, 21}}, up});
  refused(make_latent_queries(s), {{DType::kF32, {2, 21}}, {DType::kF32, {36, 8}}});
  refused(make_latent_outputs(s), {{DType::kF32, {2, 26}}, up});
  refused(make_latent_keys(), {{DType::kF32, {2, 3}}, {DType::kF32, {3, 3}}});
  refused(make_latent_keys(), {{DType::kF32, {2, 3}}, {DType::kBF16, {2, 3}}});
  EXPECT_THROW(make_latent_queries({.num_heads = 2}), UserError);
  EXPECT_THROW(make_latent_outputs({.num_heads = 2}), UserError);
}

}  // namespace
}  // namespace tessera
