// The grouped products against the CPU operators in F32 on the same BF16 values, which halves are,
// too, but for the smallest.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/half.h"
#include "ops/grouped_matmul/grouped_cuda_testing.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/grouped_matmul/grouped_matmul_cuda.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera::cuda {
namespace {

constexpr float kGuard = -7;
constexpr float kBefore = 0.5F;  // of gradients that are added to

/// Sizes of the experts' blocks, the tokens of each, H, and rows beyond the last expert's, which
/// hold nothing but NaN, as do the columns beyond an expert's size.
struct Case {
  std::vector<int64_t> sizes;
  std::vector<int64_t> rows_of;
  int64_t wide = 64;
  int64_t slack = 0;
  DType dtype = DType::kBF16;

  int64_t num_tokens() const { return std::accumulate(rows_of.begin(), rows_of.end(), int64_t{0}); }
  int64_t num_rows() const { return num_tokens() + slack; }
  int64_t largest() const { return std::ranges::max(sizes); }
  int64_t total() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }
  std::string to_string() const {
    return fmt::format("{} sizes {} rows {} H {} slack {}", dtype_name(dtype), sizes, rows_of, wide,
                       slack);
  }
};

/// Values of a type on the GPU; rows after those given are NaN.
template <typename T>
DeviceBuffer to_device_as(const Tensor& values, int64_t num_rows) {
  std::vector<T> all(num_rows * values.shape[1], T(std::numeric_limits<float>::quiet_NaN()));
  for (size_t i = 0; i < static_cast<size_t>(values.num_elements()); ++i)
    all[i] = T(values.as<float>()[i]);
  return to_device(all);
}

DeviceBuffer to_device_as(DType dtype, const Tensor& values, int64_t num_rows) {
  if (dtype == DType::kF16) return to_device_as<Half>(values, num_rows);
  return dtype == DType::kBF16 ? to_device_as<Bf16>(values, num_rows)
                               : to_device_as<float>(values, num_rows);
}

OwnedTensor random_bf16_values(int64_t rows, int64_t columns, Random& random) {
  OwnedTensor tensor = testing::random_tensor(DType::kF32, {rows, columns}, random);
  for (float& value : std::span(tensor.get().as<float>(), rows * columns))
    value = static_cast<float>(Bf16(value));
  return tensor;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

class GroupedCuda : public testing::GpuTest {};

/// A case's data on both sides.
class Rig {
 public:
  Rig(const Case& test, uint64_t seed)
      : test_(test),
        random_(seed, 1),
        narrow_(random_bf16_values(test.num_tokens(), test.largest(), random_)),
        wide_(random_bf16_values(test.num_tokens(), test.wide, random_)),
        weight_(random_bf16_values(test.total(), test.wide, random_)),
        offsets_(to_device(ends(test.rows_of))),
        begin_(to_device(block_begins())),
        counter_(to_device(std::vector<int>{0})) {
    poison_unused();
  }

  std::vector<float> run_rows(bool by_out, bool by_counter = true) const {
    if (test_.dtype == DType::kF16) return run_rows_as<Half, float>(by_out, by_counter);
    return test_.dtype == DType::kBF16 ? run_rows_as<Bf16>(by_out, by_counter)
                                       : run_rows_as<float>(by_out, by_counter);
  }

  std::vector<float> run_wgrad(bool accumulate, bool by_counter = true) const {
    const DeviceBuffer narrow = to_device_as(test_.dtype, narrow_, test_.num_rows());
    const DeviceBuffer wide = to_device_as(test_.dtype, wide_, test_.num_rows());
    std::vector<float> grad(test_.total() * test_.wide, kBefore);
    const DeviceBuffer device_grad = to_device(grad);
    grouped_wgrad({.experts = experts(),
                   .dtype = test_.dtype,
                   .num_rows = test_.num_rows(),
                   .narrow = narrow.as<void>(),
                   .wide = wide.as<void>(),
                   .grad = device_grad.as<float>(),
                   .accumulate = accumulate,
                   .counter = by_counter ? counter_.as<int>() : nullptr},
                  nullptr);
    check(cudaDeviceSynchronize());
    device_grad.copy_to(grad.data());
    return grad;
  }

  /// Every kernel once.
  void check_once() const {
    for (const bool by_out : {true, false}) expect_rows(run_rows(by_out), by_out);
    expect_grad(run_wgrad(true), make_gradient(), kBefore);
  }

  void check_all() const {
    for (const bool by_out : {true, false}) {
      const std::vector<float> y = run_rows(by_out);
      expect_rows(y, by_out);
      EXPECT_TRUE(same_bits(y, run_rows(by_out, false)));
    }
    const Gradient truth = make_gradient();
    for (const bool accumulate : {true, false}) {
      const std::vector<float> grad = run_wgrad(accumulate);
      expect_grad(grad, truth, accumulate ? kBefore : 0);
      EXPECT_TRUE(same_bits(grad, run_wgrad(accumulate, false)));
    }
    int counter = -1;
    counter_.copy_to(&counter);
    EXPECT_EQ(counter, 0);
  }

 private:
  template <typename T, typename Result = T>
  std::vector<float> run_rows_as(bool by_out, bool by_counter) const {
    const DeviceBuffer a = to_device_as<T>(by_out ? wide_ : narrow_, test_.num_rows());
    const DeviceBuffer weight = to_device_as<T>(weight_, test_.total());
    std::vector<Result> y(test_.num_rows() * y_columns(by_out), Result(kGuard));
    const DeviceBuffer device_y = to_device(y);
    grouped_rows({.experts = experts(),
                  .dtype = test_.dtype,
                  .by_out = by_out,
                  .num_rows = test_.num_rows(),
                  .a = a.as<void>(),
                  .weight = weight.as<void>(),
                  .y = device_y.as<void>(),
                  .counter = by_counter ? counter_.as<int>() : nullptr},
                 nullptr);
    check(cudaDeviceSynchronize());
    device_y.copy_to(y.data());
    return {y.begin(), y.end()};
  }

  void poison_unused() const {
    const std::vector<int64_t> tokens = ends(test_.rows_of);
    auto* const values = narrow_.get().as<float>();
    for (int64_t row = 0; row < test_.num_tokens(); ++row) {
      const int64_t used = test_.sizes[expert_of(row, tokens)];
      std::fill(values + row * test_.largest() + used, values + (row + 1) * test_.largest(),
                std::numeric_limits<float>::quiet_NaN());
    }
  }

  std::vector<int> block_begins() const {
    const std::vector<int64_t> all = ends(test_.sizes);
    return {all.begin(), all.end()};
  }

  ExpertBlocks experts() const {
    return {.num_experts = static_cast<int>(test_.sizes.size()),
            .begin = begin_.as<int>(),
            .offsets = offsets_.as<int64_t>(),
            .wide = test_.wide,
            .largest = test_.largest(),
            .total = test_.total(),
            .in_tiles = std::ranges::all_of(test_.sizes, [&](int64_t size) {
              return size == test_.largest() || size % 64 == 0;
            })};
  }

  int64_t y_columns(bool by_out) const { return by_out ? test_.largest() : test_.wide; }

  OwnedTensor run_cpu(bool by_out) const {
    KernelTable kernels;
    add_grouped_matmul_cpu(kernels);
    const auto op = make_grouped_matmul(
        {.group_sizes = test_.sizes, .side = by_out ? GroupedSide::kOut : GroupedSide::kIn});
    std::vector<OwnedTensor> outputs = testing::run_operator(
        *op, kernels,
        testing::list_inputs(
            testing::TestInput{copy(by_out ? wide_ : narrow_), testing::Role::kValue, "a"},
            testing::TestInput{copy(weight_), testing::Role::kWeight, "weight"},
            testing::TestInput{
                testing::tensor_of_i64({std::ssize(test_.sizes) + 1}, ends(test_.rows_of)),
                testing::Role::kConstant, "offsets"}));
    return std::move(outputs[0]);
  }

  static OwnedTensor copy(const OwnedTensor& tensor) {
    OwnedTensor result(tensor.get().dtype, tensor.get().shape);
    if (tensor.get().num_bytes() > 0)
      std::memcpy(result.get().data, tensor.get().data, tensor.get().num_bytes());
    return result;
  }

  int64_t expert_of(int64_t row, const std::vector<int64_t>& all) const {
    return std::ranges::upper_bound(all, row) - all.begin() - 1;
  }

  // One rounding to the type, and that of sums in F32.
  void expect_rows(const std::vector<float>& y, bool by_out) const {
    const double rounding = test_.dtype == DType::kBF16 ? 0x1p-8 : 1e-5;
    const OwnedTensor expected = run_cpu(by_out);
    const std::vector<int64_t> tokens = ends(test_.rows_of);
    const int64_t columns = y_columns(by_out);
    for (int64_t row = 0; row < test_.num_rows(); ++row) {
      const bool is_token = row < test_.num_tokens();
      const int64_t used = !is_token ? 0 : by_out ? test_.sizes[expert_of(row, tokens)] : columns;
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t i = row * columns + column;
        const float value = y[i];
        if (column >= used) {
          ASSERT_EQ(value, kGuard) << "row " << row << ", column " << column << " was written";
          continue;
        }
        const float truth = expected.get().as<float>()[i];
        ASSERT_NEAR(value, truth, std::abs(truth) * rounding + 1e-4) << row << ", " << column;
      }
    }
  }

  /// The gradient in double, and the sum of its terms' magnitudes.
  struct Gradient {
    std::vector<double> sums;
    std::vector<double> sizes;
  };
  Gradient make_gradient() const {
    const std::vector<int64_t> blocks = ends(test_.sizes);
    const std::vector<int64_t> tokens = ends(test_.rows_of);
    const size_t count = test_.total() * test_.wide;
    Gradient gradient{std::vector<double>(count), std::vector<double>(count)};
    for (int64_t t = 0; t < test_.num_tokens(); ++t) {
      const size_t expert = expert_of(t, tokens);
      const float* narrow = narrow_.get().as<float>() + t * test_.largest();
      const float* wide = wide_.get().as<float>() + t * test_.wide;
      double* sums = gradient.sums.data() + blocks[expert] * test_.wide;
      double* sizes = gradient.sizes.data() + blocks[expert] * test_.wide;
      for (int64_t g = 0; g < test_.sizes[expert]; ++g) {
        for (int64_t column = 0; column < test_.wide; ++column) {
          const double term = double{narrow[g]} * wide[column];
          *sums++ += term;
          *sizes++ += std::abs(term);
        }
      }
    }
    return gradient;
  }

  void expect_grad(const std::vector<float>& grad, const Gradient& truth, float before) const {
    for (size_t i = 0; i < grad.size(); ++i) {
      ASSERT_NEAR(grad[i], truth.sums[i] + before, 1e-6 * truth.sizes[i] + 1e-6)
          << "row " << static_cast<int64_t>(i) / test_.wide << ", column "
          << static_cast<int64_t>(i) % test_.wide;
    }
  }

  Case test_;
  Random random_;
  OwnedTensor narrow_;
  OwnedTensor wide_;
  OwnedTensor weight_;
  DeviceBuffer offsets_;
  DeviceBuffer begin_;
  DeviceBuffer counter_;
};

void check_all(const Case& test, uint64_t seed) {
  SCOPED_TRACE(test.to_string());
  Rig(test, seed).check_all();
}

TEST_F(GroupedCuda, OneTile) {
  check_all({{128}, {256}, 128}, 1);
}

TEST_F(GroupedCuda, ExpertsWithoutTokensAndWithOne) {
  check_all({{128, 128, 128, 128}, {0, 1, 0, 33}, 128, 5}, 2);
  check_all({{64, 64}, {0, 0}, 64, 3}, 3);
}

TEST_F(GroupedCuda, SizesThatFillNoTile) {
  check_all({{200, 200, 200}, {57, 300, 9}, 136, 1}, 4);
}

TEST_F(GroupedCuda, ExpertsOfDifferentSizes) {
  check_all({{64, 320, 128, 448}, {100, 0, 513, 31}, 256, 40}, 5);
}

/// Gradients of long experts are added by the L2 cache, those of short ones before they are
/// written.
TEST_F(GroupedCuda, LongAndShortExperts) {
  check_all({{136, 136, 136, 136}, {900, 20, 0, 1537}, 200, 3}, 8);
  check_all({{384, 64}, {768, 767}, 640}, 9);
}

/// So many rows that the gradient's warpgroups share tiles where it is written, and with twice as
/// many where it is added to.
TEST_F(GroupedCuda, RowsOfFewExperts) {
  check_all({{200}, {3333}, 264, 1}, 10);
  check_all({{136, 136}, {6100, 100}, 200}, 11);
  check_all({{136, 136}, {12400, 100}, 72}, 12);
}

/// More stages than a block's ring has, sizes that fill no tile, an expert without rows.
TEST_F(GroupedCuda, TinyExperts) {
  Rig({{136, 136, 136}, {800, 0, 1}, 328, 2}, 30).check_once();
}

/// More tiles than there are clusters, so that one takes two.
TEST_F(GroupedCuda, TinyTilesInTurn) {
  std::vector<int64_t> rows_of(100, 1);
  rows_of[3] = 0;
  Rig({std::vector<int64_t>(100, 8), rows_of, 72, 40}, 31).check_once();
}

/// Rows that are multiplied past the tensor cores: more of an expert than are added up at once,
/// more values of a reduction than shared memory has, columns that fill no block.
TEST_F(GroupedCuda, FewRows) {
  check_all({{768, 768, 768, 768}, {0, 5, 1, 0}, 2048, 1}, 13);
  check_all({{1544, 1544}, {4, 9}, 264}, 14);
  check_all({{8}, {1}, 8}, 15);
  check_all({std::vector<int64_t>(128, 96), std::vector<int64_t>(128, 1), 72}, 16);
  std::vector<int64_t> rows_of(128, 0);
  rows_of[0] = rows_of[31] = rows_of[127] = 2;
  check_all({std::vector<int64_t>(128, 96), rows_of, 1000, 122}, 17);
}

TEST_F(GroupedCuda, TinyFew) {
  Rig({{72, 72, 72}, {6, 0, 1}, 136, 2}, 35).check_once();
}

TEST_F(GroupedCuda, TinyLongExpert) {
  Rig({{136}, {3100}, 72, 2}, 33).check_once();
}

TEST_F(GroupedCuda, TinyLongerExpert) {
  Rig({{136}, {6200}, 72, 2}, 34).check_once();
}

TEST_F(GroupedCuda, TinyPlain) {
  Rig({{33, 5, 70}, {67, 0, 1}, 21, 2, DType::kF32}, 32).check_once();
}

TEST_F(GroupedCuda, RandomCases) {
  Random random(6, 1);
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (int i = 0; i < 30; ++i) {
    Case test;
    test.wide = 8 * (1 + below(40));
    test.slack = below(2) * below(90);
    const bool equal = below(2) == 0;
    const int64_t size = 8 * (1 + below(40));
    for (int64_t e = 1 + below(i % 5 == 0 ? 40 : 6); e > 0; --e) {
      test.sizes.push_back(equal ? size : 64 * (1 + below(4)));
      const int64_t kind = below(4);
      test.rows_of.push_back(kind == 0 ? below(2) : kind == 1 ? below(40) : below(600));
    }
    check_all(test, static_cast<uint64_t>(100 + i));
  }
}

TEST_F(GroupedCuda, AnyShapeInAllTypes) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    check_all({{5}, {0}, 24, 2, dtype}, 20);
    check_all({{1}, {1}, 1, 0, dtype}, 21);
    check_all({{40}, {3}, 17, 0, dtype}, 22);
    check_all({{48, 7, 33, 1, 20}, {90, 0, 41, 130, 7}, 24, 3, dtype}, 23);
    check_all({{48, 8, 104}, {2, 0, 205}, 64, 0, dtype}, 24);
    check_all({{128, 128}, {300, 77}, 192, 0, dtype}, 25);
    check_all({std::vector<int64_t>(1100, 8), std::vector<int64_t>(1100, 1), 16, 0, dtype}, 26);
  }
}

void expect_same_bits_again(DType dtype) {
  const Rig rig({{256, 256, 256}, {700, 3, 450}, 512, 0, dtype}, 7);
  const std::vector<float> y = rig.run_rows(true);
  const std::vector<float> grad = rig.run_wgrad(true);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(same_bits(rig.run_rows(true), y));
    EXPECT_TRUE(same_bits(rig.run_wgrad(true), grad));
  }
}

TEST_F(GroupedCuda, SameBitsAgain) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) expect_same_bits_again(dtype);
}

/// By vectors and by single values, along rows and columns, of part of a tile and of several.
TEST_F(GroupedCuda, Halves) {
  check_all({{128}, {256}, 128, 0, DType::kF16}, 30);
  check_all({{264, 264, 264}, {129, 0, 700}, 392, 3, DType::kF16}, 31);
  check_all({{130, 130}, {31, 140}, 133, 1, DType::kF16}, 32);
}

TEST_F(GroupedCuda, TinyHalves) {
  Rig({{24, 24}, {7, 2}, 40, 1, DType::kF16}, 33).check_once();
  Rig({{5, 3}, {2, 3}, 7, 1, DType::kF16}, 34).check_once();
}

class GroupedMatmulCuda : public testing::GpuTest {};

/// Experts of one size, so that all columns are defined.
TEST_F(GroupedMatmulCuda, OperatorsMatchTheCpu) {
  const std::vector<int64_t> rows_of{70, 0, 1, 200};
  for (const GroupedSide side : {GroupedSide::kOut, GroupedSide::kIn}) {
    for (const auto& [size, wide] : {std::pair<int64_t, int64_t>{64, 128}, {24, 40}, {9, 13}}) {
      const int64_t width = side == GroupedSide::kOut ? wide : size;
      const auto op =
          make_grouped_matmul({.group_sizes = std::vector<int64_t>(4, size), .side = side});
      const auto inputs = [&, size = size, wide = wide](DType dtype) {
        return testing::OperatorInputs{{"x", "weight", "offsets"},
                                       {{dtype, {ends(rows_of).back(), width}},
                                        {dtype, {4 * size, wide}},
                                        {DType::kI64, {5}}}};
      };
      SCOPED_TRACE(fmt::format("{} H {}", op->attributes(), wide));
      const OwnedTensor offsets = testing::tensor_of_i64({5}, ends(rows_of));
      testing::check_operator_on_gpu(op, inputs, {0}, cpu(), gpu(),
                                     {.values = {{"offsets", offsets}}});
    }
  }
}

TEST_F(GroupedMatmulCuda, TinyOperator) {
  const std::vector<int64_t> rows_of{7, 0, 1};
  const OwnedTensor offsets = testing::tensor_of_i64({4}, ends(rows_of));
  testing::check_operator_on_gpu(
      make_grouped_matmul({.group_sizes = {24, 24, 24}}),
      [](DType dtype) {
        return testing::OperatorInputs{{"x", "weight", "offsets"},
                                       {{dtype, {8, 40}}, {dtype, {72, 40}}, {DType::kI64, {4}}}};
      },
      {0}, cpu(), gpu(), {.values = {{"offsets", offsets}}, .once = true});
}

}  // namespace
}  // namespace tessera::cuda
