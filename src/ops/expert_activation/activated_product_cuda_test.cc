// Products with an activation on the tensor cores and off them: the bits of the two kernels that
// they stand for, which have tests beside the CPU's.
#include "ops/expert_activation/activated_product_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

using testing::ActivatedCase;

class ActivatedProductCuda : public testing::GpuTest {
 protected:
  static void check(const ActivatedCase& test, uint64_t seed) {
    testing::check_activated(test, seed, gpu(), 2e-4);
  }
};

TEST_F(ActivatedProductCuda, ShapesOfTheTensorCores) {
  uint64_t seed = 0;
  for (const int64_t size : {8, 64, 72, 256, 328}) {
    for (const int64_t wide : {8, 64, 136, 1536}) {
      const std::vector<int64_t> sizes(4, size);
      check({sizes, {300, 0, 1, 33}, wide, 0}, ++seed);
      check({sizes, {32, 256, 257, 7}, wide, 9, Activation::kSwiGLU, false}, ++seed);
      check({sizes, {32, 520, 31, 7}, wide, 9, Activation::kSwiGLU, true, 3}, ++seed);
    }
  }
}

TEST_F(ActivatedProductCuda, ManyTilesACluster) {
  check({std::vector<int64_t>(4, 768), {2100, 40, 1700, 900}, 512, 13}, 50);
  check(
      {std::vector<int64_t>(4, 768), {2100, 40, 1700, 900}, 512, 13, Activation::kSwiGLU, true, 8},
      51);
  check({std::vector<int64_t>(40, 256), std::vector<int64_t>(40, 200), 64, 0}, 52);
  check({{2048}, {4096}, 64, 0}, 53);
}

TEST_F(ActivatedProductCuda, OffTheTensorCores) {
  uint64_t seed = 100;
  for (const Activation kind : {Activation::kSwiGLU, Activation::kGeGLU, Activation::kGelu}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      check({{64, 64, 64}, {50, 0, 3}, 64, 5, kind, true, 0, dtype}, ++seed);
      check({{5, 13}, {1, 90}, 7, 0, kind, false, 0, dtype}, ++seed);
      check({{64, 128}, {66, 90}, 64, 3, kind, true, 2, dtype}, ++seed);
    }
  }
}

TEST_F(ActivatedProductCuda, RandomCases) {
  Random random(9, 2);
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (uint64_t seed = 200; seed < 216; ++seed) {
    const size_t num_experts = 1 + below(12);
    ActivatedCase test{.sizes = std::vector<int64_t>(num_experts, 8 * (1 + below(40))),
                       .wide = 8 * (1 + below(40)),
                       .slack = below(2) * below(90),
                       .apply_prob = below(4) != 0,
                       .top_k = below(3)};
    for (size_t i = 0; i < num_experts; ++i) test.rows_of.push_back(below(2) * below(700));
    check(test, seed);
  }
}

// Of experts of one size, few rows have a kernel of their own (launch_few_rows), which sums in
// another order.
TEST_F(ActivatedProductCuda, TinyOnTensorCores) {
  check({{72, 64, 72}, {33, 0, 1}, 136, 3}, 300);
}

TEST_F(ActivatedProductCuda, TinyGathered) {
  check({{72, 64, 72}, {33, 0, 1}, 136, 3, Activation::kSwiGLU, true, 2}, 301);
}

}  // namespace
}  // namespace tessera
