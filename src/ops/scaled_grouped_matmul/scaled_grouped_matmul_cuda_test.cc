// Products of scaled FP8 values on a GPU against sums in F64 of the same values.
#include <gtest/gtest.h>

#include <numeric>

#include "ops/grouped_matmul/grouped_cuda_testing.h"
#include "ops/quantize/quantize_testing.h"
#include "ops/scaled_grouped_matmul/scaled_grouped_matmul.h"
#include "ops/scaled_grouped_matmul/scaled_grouped_matmul_cuda.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera::cuda {
namespace {

using testing::ScaledTensor;

constexpr int64_t kBlock = ScaledGroupedMatmul::kBlock;
constexpr float kGuard = -7;

class ScaledGroupedCuda : public testing::GpuTest {};

struct Case {
  std::vector<int64_t> sizes;
  std::vector<int64_t> rows_of;
  int64_t reduction = 0;
  int64_t slack = 0;  ///< rows behind the last expert's, of NaN
  bool by_block = false;

  std::string to_string() const {
    return fmt::format("sizes {} rows {} reduction {} slack {}{}", sizes, rows_of, reduction, slack,
                       by_block ? " by block" : "");
  }
};

/// Values that differ much from row to row and from block to block.
OwnedTensor make_values(int64_t rows, int64_t columns, Random& random) {
  OwnedTensor tensor = testing::random_tensor(DType::kF32, {rows, columns}, random);
  float* const values = tensor.get().as<float>();
  for (int64_t i = 0; i < rows * columns; ++i)
    values[i] *= std::exp2(static_cast<float>((i / columns % 7) - (i % columns / kBlock % 5)));
  return tensor;
}

template <typename T>
DeviceBuffer with_slack(std::vector<T> values, int64_t count, T filler) {
  values.insert(values.end(), count, filler);
  return to_device(values);
}

/// A case's operands on both sides, and its products.
class Rig {
 public:
  explicit Rig(const Case& test)
      : test_(test),
        offsets_(ends(test.rows_of)),
        begins_(ends<int>(test.sizes)),
        a_(make_operand(offsets_.back(), ScaleLayout::block(1, kBlock))),
        weight_(make_operand(begins_.back(), ScaleLayout::block(kBlock, kBlock))) {}

  int64_t num_rows() const { return offsets_.back() + test_.slack; }
  int64_t largest() const { return std::ranges::max(test_.sizes); }

  std::vector<Bf16> run() const {
    const int64_t blocks = (test_.reduction + kBlock - 1) / kBlock;
    const DeviceBuffer a = with_slack<uint8_t>(a_.elements(), test_.slack * test_.reduction, 0x7f);
    const DeviceBuffer a_scales =
        with_slack<float>(a_.scales(), test_.slack * (test_.by_block ? blocks : 1), std::nanf(""));
    const DeviceBuffer weight = to_device(weight_.elements());
    const DeviceBuffer weight_scales = to_device(weight_.scales());
    const DeviceBuffer offsets = to_device(offsets_);
    const DeviceBuffer begins = to_device(begins_);
    const DeviceBuffer counter = to_device(std::vector<int>{0});
    std::vector<Bf16> y(num_rows() * largest(), Bf16(kGuard));
    const DeviceBuffer device_y = to_device(y);
    scaled_rows({.experts = {.num_experts = static_cast<int>(test_.sizes.size()),
                             .begin = begins.as<int>(),
                             .offsets = offsets.as<int64_t>(),
                             .wide = test_.reduction,
                             .largest = largest(),
                             .total = begins_.back()},
                 .by_block = test_.by_block,
                 .num_rows = num_rows(),
                 .a = a.as<void>(),
                 .a_scales = a_scales.as<float>(),
                 .weight = weight.as<void>(),
                 .weight_scales = weight_scales.as<float>(),
                 .y = device_y.as<void>(),
                 .counter = counter.as<int>()},
                nullptr);
    check(cudaDeviceSynchronize());
    device_y.copy_to(y.data());
    return y;
  }

  /// The largest error of an expert's row, in parts of the root of its sum of squares.
  void expect_products(const std::vector<Bf16>& y) const {
    const std::vector<double> left = testing::values_of(a_);
    const std::vector<double> right = testing::values_of(weight_);
    for (size_t e = 0; e < test_.sizes.size(); ++e) {
      for (int64_t r = offsets_[e]; r < offsets_[e + 1]; ++r)
        expect_row(&y[r * largest()], &left[r * test_.reduction],
                   &right[begins_[e] * test_.reduction], test_.sizes[e], r);
    }
    for (int64_t i = offsets_.back() * largest(); i < std::ssize(y); ++i)
      ASSERT_EQ(static_cast<float>(y[i]), kGuard) << test_.to_string();
  }

 private:
  ScaledTensor make_operand(int64_t rows, const ScaleLayout& blocks) {
    const OwnedTensor values = make_values(rows, test_.reduction, random_);
    return testing::quantize(values.get(), {.scale = test_.by_block ? blocks : ScaleLayout::row()});
  }

  void expect_row(const Bf16* found, const double* left, const double* right, int64_t size,
                  int64_t row) const {
    double difference = 0;
    double norm = 0;
    for (int64_t f = 0; f < size; ++f) {
      double sum = 0;
      for (int64_t k = 0; k < test_.reduction; ++k) sum += left[k] * right[f * test_.reduction + k];
      difference += (static_cast<float>(found[f]) - sum) * (static_cast<float>(found[f]) - sum);
      norm += sum * sum;
    }
    // BF16's rounding, and the fewer digits of FP8's sums.
    ASSERT_LE(std::sqrt(difference), 4e-3 * std::sqrt(norm)) << test_.to_string() << " row " << row;
    for (int64_t f = size; f < largest(); ++f) ASSERT_EQ(static_cast<float>(found[f]), kGuard);
  }

  Case test_;
  Random random_{11, 1};
  std::vector<int64_t> offsets_;
  std::vector<int> begins_;
  ScaledTensor a_;
  ScaledTensor weight_;
};

void check_case(const Case& test) {
  const Rig rig(test);
  const std::vector<Bf16> y = rig.run();
  rig.expect_products(y);
  const std::vector<Bf16> again = rig.run();
  for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i].bits, again[i].bits);
}

TEST_F(ScaledGroupedCuda, TinyRows) {
  check_case({.sizes = {64, 64}, .rows_of = {3, 9}, .reduction = 128, .slack = 2});
}

TEST_F(ScaledGroupedCuda, ScalesOfRows) {
  check_case({.sizes = {64, 200, 8}, .rows_of = {3, 0, 9}, .reduction = 144, .slack = 2});
  check_case({.sizes = {256, 256}, .rows_of = {300, 1}, .reduction = 512});
  check_case({.sizes = {384, 384, 384, 384}, .rows_of = {17, 256, 0, 129}, .reduction = 1024});
  check_case({.sizes = {768}, .rows_of = {777}, .reduction = 16});
}

TEST_F(ScaledGroupedCuda, TinyBlocks) {
  check_case(
      {.sizes = {128, 128}, .rows_of = {3, 9}, .reduction = 144, .slack = 2, .by_block = true});
}

TEST_F(ScaledGroupedCuda, ScalesOfBlocks) {
  const std::vector<int64_t> four(4, 384);
  check_case({.sizes = {128, 384}, .rows_of = {3, 300}, .reduction = 16, .by_block = true});
  check_case({.sizes = {256, 256}, .rows_of = {0, 129}, .reduction = 512, .by_block = true});
  check_case({.sizes = four, .rows_of = {17, 256, 0, 130}, .reduction = 1040, .by_block = true});
}

TEST_F(ScaledGroupedCuda, RandomRows) {
  Random random(12, 1);
  for (int i = 0; i < 24; ++i) {
    Case test{.reduction = 16 * (1 + static_cast<int64_t>(random.next_below(40))),
              .by_block = i % 2 == 1};
    const int64_t unit = test.by_block ? kBlock : 8;
    const size_t experts = 1 + random.next_below(6);
    for (size_t e = 0; e < experts; ++e) {
      test.sizes.push_back(unit * (1 + static_cast<int64_t>(random.next_below(480 / unit))));
      test.rows_of.push_back(static_cast<int64_t>(random.next_below(2) * random.next_below(400)));
    }
    test.slack = static_cast<int64_t>(random.next_below(3));
    if (std::accumulate(test.rows_of.begin(), test.rows_of.end(), test.slack) == 0) continue;
    check_case(test);
  }
}

}  // namespace
}  // namespace tessera::cuda
