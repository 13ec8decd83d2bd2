// RoundValues on a GPU against the CPU's, bit by bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "ops/round_values/recipes.h"
#include "ops/round_values/round_values.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

constexpr float kUntouched = 7;

class RoundValuesCuda : public testing::GpuTest {
 protected:
  /// What a back end makes of `x`; rows that it leaves out are kUntouched.
  static std::vector<float> round_on(const Backend& backend, const RoundValuesSpec& spec,
                                     const Tensor& x, const std::vector<int64_t>& offsets) {
    const std::vector<float> untouched(x.num_elements(), kUntouched);
    const OwnedTensor bounds = testing::tensor_of_i64({std::ssize(offsets)}, offsets);
    const OwnedTensor y_before = testing::tensor_of(x.shape, untouched, x.dtype);
    const OwnedTensor from = testing::copy_to(backend, x);
    const OwnedTensor at = testing::copy_to(backend, bounds.get());
    const OwnedTensor to = testing::copy_to(backend, y_before.get());
    std::vector<Tensor> inputs = {from.get()};
    if (spec.offsets) inputs.push_back(at.get());
    testing::run_kernel(RoundValues(spec), backend, inputs, std::vector<Tensor>{to.get()});
    const std::vector<double> values =
        testing::to_doubles(testing::copy_to_host(backend, to.get()).get());
    return {values.begin(), values.end()};
  }

  void check(const RoundValuesSpec& spec, const Tensor& x,
             const std::vector<int64_t>& offsets = {}) const {
    const std::vector<float> expected = round_on(cpu(), spec, x, offsets);
    const std::vector<float> found = round_on(gpu(), spec, x, offsets);
    const std::string what =
        fmt::format("{} {} {} groups {} offsets {}", dtype_name(x.dtype), x.shape.to_string(),
                    RoundValues(spec).attributes(), spec.group_rows.size(), offsets.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      if (std::isnan(expected[i])) {
        ASSERT_TRUE(std::isnan(found[i])) << what << " at " << i << ": " << found[i];
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(found[i]), std::bit_cast<uint32_t>(expected[i]))
            << what << " at " << i << ": " << found[i] << ", not " << expected[i];
      }
    }
  }
};

std::vector<CastSpec> casts() {
  std::vector<CastSpec> all;
  const auto add = [&](const CastSpec& cast) {
    if (std::ranges::find(all, cast) == all.end()) all.push_back(cast);
  };
  for (const Recipe& recipe : recipes()) {
    if (recipe.is_delayed()) continue;  // round_delayed_cuda_test.cc
    for (const CastSpec& cast : {recipe.activation, recipe.weight, recipe.gradient,
                                 recipe.token_activation, recipe.token_gradient})
      add(cast);
  }
  add({.length = 3, .width = 7});
  add({.length = 40, .width = 50});
  add({.length = 200, .width = 2, .nested = true});
  add({.length = 1, .width = 300, .stochastic = true});
  add({.length = 16, .rotated = true});
  return all;
}

TEST_F(RoundValuesCuda, TinyBlocksOfEachKind) {
  Random random(5, 1);
  const OwnedTensor x = testing::random_tensor(DType::kBF16, {18, 136}, random);
  for (const int sum_dim : {0, 1}) {
    check({.cast = {.length = 16, .nested = true, .rotated = true}, .sum_dim = sum_dim}, x.get());
    check({.cast = {.length = 16, .width = 16}, .sum_dim = sum_dim, .offsets = true}, x.get(),
          {1, 5, 5, 17});
  }
}

TEST_F(RoundValuesCuda, GivesTheHostsBits) {
  Random random(6, 1);
  for (const Shape& shape : {Shape{1, 1}, {1, 128}, {5, 300}, {131, 264}, {40, 2048}, {257, 100}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const OwnedTensor x = testing::random_tensor(dtype, shape, random, 10.0);
      for (const CastSpec& cast : casts()) {
        for (const int sum_dim : {0, 1}) check({.cast = cast, .sum_dim = sum_dim}, x.get());
      }
    }
  }
}

TEST_F(RoundValuesCuda, GroupsHaveScalesOfTheirOwn) {
  Random random(7, 1);
  constexpr int64_t kRows = 300;
  for (const int64_t num_columns : {96, 200, 1030}) {
    const OwnedTensor x = testing::random_tensor(DType::kBF16, {kRows, num_columns}, random, 2.0);
    for (const CastSpec& cast : casts()) {
      for (const int sum_dim : {0, 1}) {
        check({.cast = cast, .sum_dim = sum_dim, .group_rows = {100, 100, 100}}, x.get());
        check({.cast = cast, .sum_dim = sum_dim, .group_rows = {0, 60, 60, 1, 179}}, x.get());
        check({.cast = cast, .sum_dim = sum_dim, .offsets = true}, x.get(), {3, 3, 40, 200, 297});
        check({.cast = cast, .sum_dim = sum_dim, .offsets = true}, x.get(),
              {0, 0, 17, 17, 18, 131, 300, 300});
      }
    }
  }
}

TEST_F(RoundValuesCuda, NothingToRound) {
  Random random(8, 1);
  for (const Shape& shape : {Shape{0, 16}, {3, 0}}) {
    const OwnedTensor x = testing::random_tensor(DType::kBF16, shape, random);
    for (const CastSpec& cast : casts()) check({.cast = cast}, x.get());
  }
  const OwnedTensor x = testing::random_tensor(DType::kBF16, {4, 8}, random);
  check({.cast = {}, .offsets = true}, x.get(), {2, 2});
}

TEST_F(RoundValuesCuda, ZerosTinyHugeAndNonFiniteNumbers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const OwnedTensor x =
      testing::tensor_of({8, 2}, {0, -0.0F, 1e-42F, 0, kInfinity, 2, std::nanf(""), 2, 3e38F,
                                  -1e38F, 1e-3F, -1e-3F, 1e-30F, -1e-38F, 447, 449});
  for (const CastSpec& cast : casts()) {
    for (const int sum_dim : {0, 1}) check({.cast = cast, .sum_dim = sum_dim}, x.get());
  }
}

/// Rows that are not in use keep what they have, and do not count.
TEST_F(RoundValuesCuda, RaggedRows) {
  for (const CastSpec& cast : casts()) {
    for (const int sum_dim : {0, 1}) {
      testing::check_ragged_operator_on_gpu(
          make_round_values({.cast = cast, .sum_dim = sum_dim}),
          [](DType dtype) {
            return testing::OperatorInputs{.names = {"a"},
                                           .types = {testing::ragged_rows(dtype, {64, 160})}};
          },
          {}, 37, cpu(), gpu(), {.seed = 3, .tolerance_f32 = 0});
    }
  }
}

}  // namespace
}  // namespace tessera
