// Products that gather their rows: beside the CPU's, and bit by bit beside permute and the product
// of its rows, on the tensor cores (BF16, multiples of 8) and off them.
#include <gtest/gtest.h>

#include "ops/grouped_matmul/gather_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

using testing::GatherCase;

class GatheredProductsCuda : public testing::GpuTest {
 protected:
  void check(const GatherCase& c, uint64_t seed) const {
    SCOPED_TRACE(c.to_string());
    for (const DType dtype : {DType::kF32, DType::kBF16})
      testing::expect_bits_of_permute(c, dtype, seed, gpu());
    // Columns beyond an expert's own size are not written, so they cannot be compared.
    if (std::ranges::count(c.sizes, c.sizes[0]) == c.num_experts()) beside_cpu(c, {.seed = seed});
  }
  void beside_cpu(const GatherCase& c, testing::GpuCheck options) const {
    const auto routing = testing::make_routing(c, options.seed);
    for (const auto& [name, tensor] : routing)
      if (name != "tokens" || c.slack > 0) options.values.emplace(name, tensor.get());
    const auto build = [&](DType dtype) {
      testing::GatherProgram built(c, true, dtype);
      return testing::CheckedProgram{std::move(built.program), built.request};
    };
    testing::check_on_gpu(build, cpu(), gpu(), options);
  }
};

TEST_F(GatheredProductsCuda, ShapesOfTheTensorCores) {
  uint64_t seed = 0;
  for (const auto& [num_tokens, slack] :
       {std::pair<int64_t, int64_t>{0, 9}, {1, 0}, {130, 9}, {601, 0}}) {
    check({num_tokens, slack, {128, 128, 128, 128}, 2, 128}, ++seed);
    check({num_tokens, slack, {64, 192, 128}, 3, 72, 16}, ++seed);
    check({num_tokens, slack, {200, 200, 200}, 1, 136}, ++seed);
    check({num_tokens, slack, {64, 64, 64, 64}, 4, 64, 128}, ++seed);
  }
}

TEST_F(GatheredProductsCuda, AllTokensToOneExpertAndFewToMany) {
  check({600, 0, {256, 256, 256}, 3, 128, 1, 1}, 50);
  check({150, 20, std::vector<int64_t>(48, 64), 8, 136}, 51);
  check({2, 0, std::vector<int64_t>(128, 32), 1, 64, 8}, 52);
  check({40, 0, std::vector<int64_t>(32, 16), 9, 1024}, 53);
}

TEST_F(GatheredProductsCuda, ShapesOfThePlainKernels) {
  uint64_t seed = 100;
  for (const int64_t num_tokens : {0, 1, 77}) {
    check({num_tokens, 3, {5, 5, 5}, 2, 13}, ++seed);
    check({num_tokens, 0, {9, 24, 33, 1}, 3, 20, 4}, ++seed);
    check({num_tokens, 5, {12, 12}, 1, 7}, ++seed);
  }
}

TEST_F(GatheredProductsCuda, TinyPlain) {
  beside_cpu({9, 3, {20, 20, 20}, 2, 37, 4}, {.dtypes = {DType::kF32}, .once = true});
}

TEST_F(GatheredProductsCuda, TinyOnTensorCores) {
  beside_cpu({9, 120, {72, 72, 72}, 2, 136, 4}, {.dtypes = {DType::kBF16}, .once = true});
}

TEST_F(GatheredProductsCuda, TinyFew) {
  beside_cpu({9, 3, {72, 72, 72}, 2, 136, 4}, {.dtypes = {DType::kBF16}, .once = true});
}

TEST_F(GatheredProductsCuda, RandomCases) {
  Random random(6, 1);
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (uint64_t seed = 200; seed < 208; ++seed) {
    const int64_t num_experts = 1 + below(12);
    const int64_t size = 8 * (1 + below(40));
    check({.num_tokens = below(300),
           .slack = below(2) * below(90),
           .sizes = std::vector<int64_t>(num_experts, size),
           .top_k = 1 + below(std::min<int64_t>(num_experts, 8)),
           .width = 8 * (1 + below(40)),
           .alignment = below(2) == 0 ? 1 : 16},
          seed);
  }
}

}  // namespace
}  // namespace tessera
