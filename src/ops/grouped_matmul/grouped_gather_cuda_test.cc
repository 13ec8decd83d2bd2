// Products on the tensor cores that gather their rows beside the same products of rows that lie in
// order: the same bits.
#include <gtest/gtest.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/dtype.h"
#include "core/random.h"
#include "ops/cuda/tensor_map.h"
#include "ops/grouped_matmul/grouped_cuda_testing.h"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/testing/gpu_test.h"

namespace tessera::cuda {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Sizes of the experts' blocks, the rows of each, H, and rows beyond the last expert's.
struct Case {
  std::vector<int64_t> sizes;
  std::vector<int64_t> rows_of;
  int64_t wide = 64;
  int64_t num_tokens = 50;
  int64_t top_k = 2;
  int64_t slack = 0;

  int64_t num_used() const { return std::accumulate(rows_of.begin(), rows_of.end(), int64_t{0}); }
  int64_t num_rows() const { return num_used() + slack; }
  int64_t largest() const { return std::ranges::max(sizes); }
  int64_t total() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }
  std::string to_string() const {
    return fmt::format("sizes {} rows {} H {} tokens {} K {} slack {}", sizes, rows_of, wide,
                       num_tokens, top_k, slack);
  }
};

template <typename T>
std::vector<T> to_host(const DeviceBuffer& buffer) {
  std::vector<T> values(buffer.num_bytes() / sizeof(T));
  buffer.copy_to(values.data());
  return values;
}

std::vector<Bf16> random_values(int64_t count, Random& random) {
  std::vector<Bf16> values(count);
  for (Bf16& value : values) value = Bf16(2 * static_cast<float>(random.next_uniform()) - 1);
  return values;
}

/// Where rows come from: any token, one in eight nowhere; what no expert has must not be read.
std::vector<int> random_sources(const Case& test, Random& random) {
  std::vector<int> sources(test.num_rows(), std::numeric_limits<int>::max());
  for (size_t row = 0; row < static_cast<size_t>(test.num_used()); ++row) {
    const auto source = random.next_below(static_cast<uint64_t>(test.num_tokens * test.top_k));
    sources[row] = random.next_below(8) == 0 ? -1 : static_cast<int>(source);
  }
  return sources;
}

std::vector<Bf16> permute(const Case& test, const std::vector<Bf16>& tokens,
                          const std::vector<int>& sources) {
  std::vector<Bf16> rows(test.num_rows() * test.wide, Bf16(kNan));
  for (int64_t row = 0; row < test.num_used(); ++row) {
    const int source = sources[row];
    for (int64_t column = 0; column < test.wide; ++column) {
      rows[row * test.wide + column] =
          source < 0 ? Bf16(0.0F) : tokens[source / test.top_k * test.wide + column];
    }
  }
  return rows;
}

/// A case's data on the GPU.
class Rig {
 public:
  Rig(const Case& test, Random& random) : Rig(test, random, random_sources(test, random)) {}

  std::vector<uint16_t> run_rows(bool gathers) const {
    const std::vector<uint16_t> guard(test_.num_rows() * test_.largest(), 0x1234);
    const DeviceBuffer y = to_device(guard);
    GroupedRowsParams params = {
        .weight =
            make_tensor_map({weight_.as<void>(), test_.total(), test_.wide}, kGroupedFeatures),
        .a = in_order(kGroupedBoxRows),
        .y_map =
            make_tensor_map({y.as<void>(), test_.num_rows(), test_.largest()}, kGroupedStoreRows),
        .y = y.as<void>(),
        .block_begin = begins_.as<int>(),
        .offsets = offsets_.as<int64_t>(),
        .num_experts = static_cast<int>(test_.sizes.size()),
        .wide = static_cast<int>(test_.wide),
        .y_columns = static_cast<int>(test_.largest()),
        .counter = counter_.as<int>()};
    if (gathers) set_source(params);
    launch_grouped_rows(params, true, nullptr);
    check(cudaDeviceSynchronize());
    return to_host<uint16_t>(y);
  }

  std::vector<uint32_t> run_wgrad(bool gathers, bool accumulate) const {
    const DeviceBuffer grad = to_device(std::vector<float>(test_.total() * test_.wide, 0.5F));
    GroupedWgradParams params = {
        .narrow = make_tensor_map({narrow_.as<void>(), test_.num_rows(), test_.largest()},
                                  kGroupedReduction),
        .wide = in_order(kGroupedReduction),
        .grad = grad.as<float>(),
        .block_begin = begins_.as<int>(),
        .offsets = offsets_.as<int64_t>(),
        .num_experts = static_cast<int>(test_.sizes.size()),
        .num_columns = static_cast<int>(test_.wide),
        .num_rows = test_.num_rows(),
        .weight_rows = test_.total(),
        .accumulate = accumulate,
        .counter = counter_.as<int>()};
    if (gathers) set_source(params);
    launch_grouped_wgrad(params, nullptr);
    check(cudaDeviceSynchronize());
    return to_host<uint32_t>(grad);
  }

 private:
  Rig(const Case& test, Random& random, const std::vector<int>& sources)
      : Rig(test, random, sources, random_values(test.num_tokens * test.wide, random)) {}
  Rig(const Case& test, Random& random, const std::vector<int>& sources,
      const std::vector<Bf16>& tokens)
      : test_(test),
        tokens_(to_device(tokens)),
        rows_(to_device(permute(test, tokens, sources))),
        sources_(to_device(sources)),
        weight_(to_device(random_values(test.total() * test.wide, random))),
        narrow_(to_device(random_values(test.num_rows() * test.largest(), random))),
        offsets_(to_device(ends<int64_t>(test.rows_of))),
        begins_(to_device(ends<int>(test.sizes))),
        counter_(to_device(std::vector<int>{0})) {}

  CUtensorMap in_order(int box_rows) const {
    return make_tensor_map({rows_.as<void>(), test_.num_rows(), test_.wide}, box_rows);
  }

  template <typename Params>
  void set_source(Params& params) const {
    params.source = sources_.as<int>();
    params.top_k = Divider(static_cast<uint32_t>(test_.top_k));
    params.tokens = tokens_.as<void>();
    params.num_source = test_.num_rows();
  }

  Case test_;
  DeviceBuffer tokens_;
  DeviceBuffer rows_;
  DeviceBuffer sources_;
  DeviceBuffer weight_;
  DeviceBuffer narrow_;
  DeviceBuffer offsets_;
  DeviceBuffer begins_;
  DeviceBuffer counter_;
};

template <typename T>
void expect_same(const std::vector<T>& values, const std::vector<T>& expected) {
  ASSERT_EQ(values.size(), expected.size());
  size_t num_wrong = 0;
  size_t first = values.size();
  for (size_t i = values.size(); i-- > 0;) {
    if (values[i] == expected[i]) continue;
    ++num_wrong;
    first = i;
  }
  EXPECT_EQ(num_wrong, 0) << "of " << values.size() << ", the first at " << first;
}

void check_all(const Case& test, uint64_t seed) {
  SCOPED_TRACE(test.to_string());
  Random random(seed, 1);
  const Rig rig(test, random);
  {
    SCOPED_TRACE("rows");
    expect_same(rig.run_rows(true), rig.run_rows(false));
  }
  for (const bool accumulate : {false, true}) {
    SCOPED_TRACE(accumulate ? "gradient added to" : "gradient written");
    expect_same(rig.run_wgrad(true, accumulate), rig.run_wgrad(false, accumulate));
  }
}

class GroupedGatherCuda : public testing::GpuTest {};

TEST_F(GroupedGatherCuda, WholeTiles) {
  check_all({{128}, {256}, 128}, 1);
  check_all({{256, 256}, {256, 512}, 512, 400, 8}, 2);
}

TEST_F(GroupedGatherCuda, ExpertsWithoutTokensAndWithOne) {
  check_all({{128, 128, 128, 128}, {0, 1, 0, 33}, 128, 7, 3, 5}, 3);
  check_all({{64, 64}, {0, 0}, 64, 3, 1, 3}, 4);
}

TEST_F(GroupedGatherCuda, SizesThatFillNoTile) {
  check_all({{200, 200, 200}, {57, 300, 9}, 136, 100, 6, 1}, 5);
  check_all({{8}, {7}, 8, 2, 2, 90}, 6);
}

TEST_F(GroupedGatherCuda, ExpertsOfDifferentSizes) {
  check_all({{64, 320, 128, 448}, {100, 0, 513, 31}, 256, 300, 4, 40}, 7);
}

TEST_F(GroupedGatherCuda, ManyTilesForEachCluster) {
  check_all({std::vector<int64_t>(40, 384), std::vector<int64_t>(40, 700), 328, 3000, 8, 0}, 8);
}

/// More stages than a block's ring has, sizes that fill no tile, an expert without rows.
const Case kTiny{{136, 136, 136}, {37, 0, 1}, 328, 11, 3, 95};

TEST_F(GroupedGatherCuda, TinyRows) {
  Random random(20, 1);
  const Rig rig(kTiny, random);
  expect_same(rig.run_rows(true), rig.run_rows(false));
}

TEST_F(GroupedGatherCuda, TinyGradient) {
  Random random(21, 1);
  const Rig rig(kTiny, random);
  expect_same(rig.run_wgrad(true, true), rig.run_wgrad(false, true));
}

TEST_F(GroupedGatherCuda, RandomCases) {
  Random random(9, 1);
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (int i = 0; i < 30; ++i) {
    Case test;
    test.wide = 8 * (1 + below(80));
    test.num_tokens = 1 + below(2000);
    test.top_k = 1 + below(9);
    test.slack = below(2) * below(90);
    const bool equal = below(2) == 0;
    const int64_t size = 8 * (1 + below(40));
    for (int64_t e = 1 + below(i % 5 == 0 ? 40 : 6); e > 0; --e) {
      test.sizes.push_back(equal ? size : 64 * (1 + below(4)));
      const int64_t kind = below(4);
      test.rows_of.push_back(kind == 0 ? below(2) : kind == 1 ? below(40) : below(600));
    }
    if (test.num_rows() > 0) check_all(test, static_cast<uint64_t>(100 + i));
  }
}

TEST_F(GroupedGatherCuda, SameBitsAgain) {
  Random random(10, 1);
  const Rig rig({{512, 512, 512}, {1500, 3, 450}, 512, 700, 4}, random);
  const std::vector<uint16_t> y = rig.run_rows(true);
  const std::vector<uint32_t> grad = rig.run_wgrad(true, true);
  for (int i = 0; i < 20; ++i) {
    expect_same(rig.run_rows(true), y);
    expect_same(rig.run_wgrad(true, true), grad);
  }
}

}  // namespace
}  // namespace tessera::cuda
