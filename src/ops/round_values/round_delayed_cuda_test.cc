// RoundValues by scales that are given, on a GPU against the CPU's, bit by bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "ops/round_values/round_values.h"
#include "ops/round_values/tally.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

constexpr int64_t kNumPlaces = 4;

class RoundDelayedCuda : public testing::GpuTest {
 protected:
  struct Rounded {
    std::vector<double> y;
    std::vector<double> tally;
  };

  /// What a back end adds to a tally that has something, and makes of rows that have something.
  static Rounded round_on(const Backend& backend, const RoundValuesSpec& spec, const Tensor& x,
                          float scale, const std::vector<int64_t>& offsets) {
    const OwnedTensor bounds = testing::tensor_of_i64({std::ssize(offsets)}, offsets);
    const OwnedTensor scales = testing::tensor_of({kNumPlaces}, {7, scale, 7, scale});
    const std::vector<float> untouched(x.num_elements(), 7);
    const OwnedTensor y_before = testing::tensor_of(x.shape, untouched, x.dtype);
    std::vector<int64_t> counts(kNumPlaces * kTallyColumns);
    for (size_t i = 0; i < counts.size(); ++i) counts[i] = static_cast<int64_t>(3 * i);
    const OwnedTensor tally_before = testing::tensor_of_i64({kNumPlaces, kTallyColumns}, counts);
    const OwnedTensor from = testing::copy_to(backend, x);
    const OwnedTensor at = testing::copy_to(backend, bounds.get());
    const OwnedTensor by = testing::copy_to(backend, scales.get());
    const OwnedTensor to = testing::copy_to(backend, y_before.get());
    const OwnedTensor tally = testing::copy_to(backend, tally_before.get());
    std::vector<Tensor> inputs = {from.get()};
    if (spec.offsets) inputs.push_back(at.get());
    inputs.push_back(by.get());
    std::vector<Tensor> outputs = {to.get()};
    if (spec.tallies) outputs.push_back(tally.get());
    testing::run_kernel(RoundValues(spec), backend, inputs, outputs);
    return {testing::to_doubles(testing::copy_to_host(backend, to.get()).get()),
            testing::to_doubles(testing::copy_to_host(backend, tally.get()).get())};
  }

  void check(const RoundValuesSpec& spec, const Tensor& x, float scale,
             const std::vector<int64_t>& offsets = {}) const {
    const Rounded expected = round_on(cpu(), spec, x, scale, offsets);
    const Rounded found = round_on(gpu(), spec, x, scale, offsets);
    const std::string what =
        fmt::format("{} {} {} scale {} offsets {}", dtype_name(x.dtype), x.shape.to_string(),
                    RoundValues(spec).attributes(), scale, offsets.size());
    for (size_t i = 0; i < expected.y.size(); ++i) {
      if (std::isnan(expected.y[i])) {
        ASSERT_TRUE(std::isnan(found.y[i])) << what << " at " << i << ": " << found.y[i];
      } else {
        ASSERT_EQ(std::bit_cast<uint64_t>(found.y[i]), std::bit_cast<uint64_t>(expected.y[i]))
            << what << " at " << i << ": " << found.y[i] << ", not " << expected.y[i];
      }
    }
    EXPECT_EQ(found.tally, expected.tally) << what;
  }

  static std::vector<RoundValuesSpec> specs() {
    std::vector<RoundValuesSpec> all;
    for (const NarrowNumber number : {NarrowNumber::kE4M3, NarrowNumber::kE5M2}) {
      const CastSpec cast{.number = number, .width = 0, .delayed = true};
      all.push_back({.cast = cast, .places = {1}, .tallies = true});
      all.push_back({.cast = cast, .places = {3, 0, 1}, .tallies = true, .overflows = true});
      all.push_back({.cast = cast, .places = {3}});
    }
    return all;
  }
};

TEST_F(RoundDelayedCuda, TinyRowsOfEachKind) {
  Random random(41, 1);
  const OwnedTensor x = testing::random_tensor(DType::kBF16, {18, 136}, random, 100.0);
  for (RoundValuesSpec spec : specs()) {
    check(spec, x.get(), 0x1p-3F);
    spec.offsets = true;
    check(spec, x.get(), 0x1p-3F, {1, 5, 5, 17});
  }
}

TEST_F(RoundDelayedCuda, GivesTheHostsBits) {
  Random random(42, 1);
  for (const Shape& shape :
       {Shape{0, 16}, {3, 0}, {1, 1}, {1, 128}, {5, 301}, {131, 264}, {700, 2048}, {257, 100}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const OwnedTensor x = testing::random_tensor(dtype, shape, random, 10.0);
      for (const RoundValuesSpec& spec : specs()) {
        for (const float scale : {0.0F, 0x1p-6F, 0x1p-12F, 1.0F, 0x1p20F})
          check(spec, x.get(), scale);
      }
    }
  }
}

TEST_F(RoundDelayedCuda, RowsOfExperts) {
  Random random(43, 1);
  for (const int64_t num_columns : {96, 203, 1030}) {
    const OwnedTensor x = testing::random_tensor(DType::kBF16, {300, num_columns}, random, 2.0);
    for (RoundValuesSpec spec : specs()) {
      spec.offsets = true;
      check(spec, x.get(), 0x1p-9F, {3, 3, 40, 200, 297});
      check(spec, x.get(), 0x1p-9F, {0, 0, 17, 300});
      check(spec, x.get(), 0x1p-9F, {5, 5});
      spec.offsets = false;
      spec.group_rows = {100, 0, 200};
      check(spec, x.get(), 0x1p-9F);
    }
  }
}

TEST_F(RoundDelayedCuda, ZerosTinyHugeAndNonFiniteNumbers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const OwnedTensor x =
      testing::tensor_of({8, 2}, {0, -0.0F, 1e-42F, 0, kInfinity, 2, std::nanf(""), 2, 3e38F,
                                  -1e38F, 1e-3F, -1e-3F, 1e-30F, -1e-38F, 447, 449});
  for (const RoundValuesSpec& spec : specs()) {
    for (const float scale : {0.0F, 1.0F, 0x1p-100F, 0x1p119F}) check(spec, x.get(), scale);
  }
}

/// Rows that are not in use keep what they have, and do not count.
TEST_F(RoundDelayedCuda, RaggedRows) {
  for (const RoundValuesSpec& spec : specs()) {
    if (spec.tallies) continue;
    testing::check_ragged_operator_on_gpu(
        make_round_values(spec),
        [](DType dtype) {
          return testing::OperatorInputs{
              .names = {"a", "scales"},
              .types = {testing::ragged_rows(dtype, {64, 160}), {DType::kF32, {kNumPlaces}}}};
        },
        {}, 37, cpu(), gpu(), {.seed = 3, .tolerance_f32 = 0});
  }
}

}  // namespace
}  // namespace tessera
