#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/compress_windows/cached_testing.h"

namespace tessera::testing {
namespace {

Backend backend() {
  KernelTable table;
  add_compress_windows_cpu(table);
  add_compress_windows_cached_cpu(table);
  return Backend(std::move(table));
}

void expect_alike(const std::vector<double>& found, const std::vector<double>& expected,
                  double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    ASSERT_NEAR(found[i], expected[i], tolerance * (1 + std::abs(expected[i]))) << i;
}

constexpr CompressSpec kSpecs[] = {
    {.rate = 4}, {.rate = 3, .overlaps = true}, {.rate = 1, .overlaps = true}};

/// However a sequence is cut, by itself or among others, its entries have the same bits.
TEST(CompressWindowsCached, PassesGiveTheEntriesOfPackedSequences) {
  for (const CompressSpec& spec : kSpecs) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const double tolerance = dtype == DType::kF32 ? 2e-6 : 8e-3;
      const CachedCompression several(spec, {5, 40, 0, 1, 23}, 5, dtype);
      const auto found = several.in_passes(backend(), KeptRows::kPaged, 1);
      expect_alike(found, several.packed(backend()), tolerance);
      EXPECT_EQ(several.in_passes(backend(), KeptRows::kPaged, 2), found);
      const CachedCompression one(spec, {40}, 5, dtype);
      const auto alone = one.in_passes(backend(), KeptRows::kCached, 3);
      expect_alike(alone, one.packed(backend()), tolerance);
      EXPECT_EQ(one.in_passes(backend(), KeptRows::kPaged, 4), alone);
    }
  }
}

TEST(CompressWindowsCached, ShapeRule) {
  const CompressWindowsCached op(
      {.windows = {.rate = 4, .overlaps = true}, .num_slots = 1, .first_entry = 7});
  const ValueType kv{DType::kBF16, {10, 6}};
  const ValueType bias{DType::kF32, {4, 6}};
  const ValueType positions{DType::kI32, {10}};
  const auto types = op.infer(std::vector{kv, kv, bias, positions});
  EXPECT_EQ(types[CompressWindowsCached::kEntries], (ValueType{DType::kBF16, {10, 3}}));
  EXPECT_EQ(types[CompressWindowsCached::kState], (ValueType{DType::kBF16, {8, 12}}));
  EXPECT_THAT(
      [&] {
        op.infer(std::vector{kv, kv, bias});
      },
      ::testing::ThrowsMessage<UserError>(::testing::HasSubstr("takes 4 inputs")));
  EXPECT_THROW(CompressWindowsCached({.kept = KeptRows::kPacked}), UserError);
  EXPECT_THROW(CompressWindowsCached({.num_slots = 0}), UserError);
  const CompressWindowsCached paged({.kept = KeptRows::kPaged, .num_slots = 2});
  const ValueType single{DType::kF32, {3, 6}};
  const std::vector<ValueType> inputs = {single,
                                         single,
                                         bias,
                                         {DType::kI32, {3}},
                                         {DType::kI32, {3}},
                                         {DType::kI32, {2, 5}},
                                         {DType::kI32, {3}}};
  EXPECT_THAT([&] { paged.infer(inputs); },
              ::testing::ThrowsMessage<UserError>(::testing::HasSubstr("slots are")));
}

}  // namespace
}  // namespace tessera::testing
