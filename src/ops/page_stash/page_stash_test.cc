#include "ops/page_stash/page_stash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "ops/page_stash/page_stash_testing.h"
#include "ops/testing/op_test.h"
#include "ops/testing/shadow_backend.h"

namespace tessera {
namespace {

/// A value that is ragged in its first dim, at its bound.
ValueType ragged(DType dtype, const Shape& shape) {
  return {dtype, shape, 0, Extent::own_input(0)};
}

/// A pool, and the kernels at work on it.
class Stash {
 public:
  explicit Stash(const testing::PagePool& pool)
      : pool_(pool),
        pages_(DType::kU8, {pool.num_pages * pool.page_bytes}),
        free_(DType::kI32, {pool.num_pages}),
        state_(DType::kI64, {kPoolStates}) {
    add_page_stash_cpu(kernels_);
    const auto free = free_.get().span<int32_t>();
    std::iota(free.begin(), free.end(), 0);
    state_.get().span<int64_t>()[kPoolPages] = pool.num_pages;
    state_.get().span<int64_t>()[kFreePages] = pool.num_pages;
  }

  OwnedTensor make_table(const ValueType& type) const {
    return {DType::kI32, {most_pages(type, pool_.page_bytes)}};
  }
  void stash(const Tensor& value, const ValueType& type, const Tensor& table) {
    const OperatorPtr op = make_stash_pages(pool_.page_bytes);
    ASSERT_EQ(op->infer(std::vector{type})[StashPages::kTable].shape, table.shape);
    const std::vector<Tensor> inputs = {value};
    const std::vector<Tensor> outputs = {pages_.get(), free_.get(), state_.get(), table};
    kernels_.at("stash_pages")(*op, {inputs, outputs, {}});
  }
  void reload(const Tensor& value, const ValueType& type, const Tensor& table) {
    const OperatorPtr op = make_reload_pages(pool_.page_bytes, type);
    OwnedTensor rows(DType::kI64, {1});
    *rows.get().as<int64_t>() = value.shape[0];
    const std::vector<Tensor> inputs = {rows.get(), table};
    const std::vector<Tensor> outputs = {pages_.get(), free_.get(), state_.get(), value};
    kernels_.at("reload_pages")(*op, {inputs, outputs, {}});
  }
  int64_t num_free() const { return state_.get().span<int64_t>()[kFreePages]; }
  int64_t num_missing() const { return state_.get().span<int64_t>()[kMissingPages]; }
  /// Whether each page is free once, where all were given back.
  bool has_all_pages() const {
    std::vector<int32_t> pages(free_.get().span<int32_t>().begin(),
                               free_.get().span<int32_t>().end());
    std::ranges::sort(pages);
    std::vector<int32_t> expected(pages.size());
    std::iota(expected.begin(), expected.end(), 0);
    return num_free() == pool_.num_pages && pages == expected;
  }

 private:
  testing::PagePool pool_;
  KernelTable kernels_;
  OwnedTensor pages_, free_, state_;
};

std::vector<std::byte> bytes_of(const Tensor& tensor) {
  std::vector<std::byte> bytes(tensor.num_bytes());
  if (!bytes.empty()) std::memcpy(bytes.data(), tensor.data, bytes.size());
  return bytes;
}

struct Stashed {
  ValueType type;
  OwnedTensor memory;  ///< at the bound
  OwnedTensor table;
  int64_t rows = 0;
  std::vector<std::byte> expected;

  Tensor value() const {
    Tensor tensor = memory;
    tensor.shape[0] = rows;
    return tensor;
  }
};

constexpr int64_t kBound = 50;

Stashed make_stashed(const Stash& stash, const ValueType& type, std::mt19937& random) {
  Stashed made{type, OwnedTensor(type.dtype, type.shape), stash.make_table(type)};
  const int64_t rows = static_cast<int64_t>(random() % (kBound + 3)) - 1;
  made.rows = std::clamp<int64_t>(rows, 0, kBound);
  const Tensor all = made.memory;
  auto* const bytes = static_cast<uint8_t*>(all.data);
  for (int64_t i = 0; i < all.num_bytes(); ++i) bytes[i] = static_cast<uint8_t>(random());
  made.expected = bytes_of(made.value());
  return made;
}

/// Values of several widths, reloaded in any order; what is not theirs stays.
TEST(PageStashTest, GivesBackWhatItWasGiven) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    Stash stash({.num_pages = 400, .page_bytes = 64});
    std::vector<Stashed> values;
    for (const ValueType& type :
         {ragged(DType::kF32, {kBound, 7}), ragged(DType::kBF16, {kBound, 3, 5}),
          ragged(DType::kI32, {kBound}), ragged(DType::kI64, {kBound}),
          ragged(DType::kF32, {kBound, 32})})
      values.push_back(make_stashed(stash, type, random));
    int64_t taken = 0;
    for (const Stashed& one : values) {
      stash.stash(one.value(), one.type, one.table);
      taken += (std::ssize(one.expected) + 63) / 64;
      std::memset(one.memory.get().data, 0x11, one.memory.get().num_bytes());
    }
    EXPECT_EQ(stash.num_free(), 400 - taken);
    std::ranges::shuffle(values, random);
    for (const Stashed& one : values) {
      stash.reload(one.value(), one.type, one.table);
      EXPECT_EQ(bytes_of(one.value()), one.expected);
      const auto all = bytes_of(one.memory);
      EXPECT_TRUE(std::all_of(all.begin() + std::ssize(one.expected), all.end(),
                              [](std::byte byte) { return byte == std::byte{0x11}; }));
    }
    EXPECT_TRUE(stash.has_all_pages());
    EXPECT_EQ(stash.num_missing(), 0);
  }
}

/// Others keep theirs, and the pool is as before.
TEST(PageStashTest, AValueThatFindsNoRoomBecomesNaN) {
  Stash stash({.num_pages = 5, .page_bytes = 32});
  std::mt19937 random(4);
  Stashed small = make_stashed(stash, ragged(DType::kF32, {kBound, 2}), random);
  small.rows = 12;  // 3 pages
  small.expected = bytes_of(small.value());
  Stashed large = make_stashed(stash, ragged(DType::kBF16, {kBound, 4}), random);
  large.rows = 16;  // 4 pages
  Stashed map = make_stashed(stash, ragged(DType::kI32, {kBound}), random);
  map.rows = 30;  // 4 pages
  for (const Stashed* one : {&small, &large, &map})
    stash.stash(one->value(), one->type, one->table);
  EXPECT_EQ(stash.num_missing(), 6) << "11 pages, of which there are 5";
  EXPECT_EQ(stash.num_free(), 2);
  for (const Stashed* one : {&large, &small, &map})
    stash.reload(one->value(), one->type, one->table);
  EXPECT_EQ(bytes_of(small.value()), small.expected);
  for (const double value : testing::to_doubles(large.value())) EXPECT_TRUE(std::isnan(value));
  EXPECT_TRUE(std::ranges::all_of(map.value().span<int32_t>(), [](int v) { return v == 0; }));
  EXPECT_TRUE(stash.has_all_pages());
  EXPECT_EQ(stash.num_missing(), 6) << "it stays known";
}

/// A device whose memory the host does not reach, through the interpreter.
TEST(PageStashTest, ProgramsOnADeviceLeaveWhatTheHostLeaves) {
  KernelTable kernels;
  add_page_stash_cpu(kernels);
  testing::check_stash(testing::make_shadow_backend(kernels), Backend(kernels));
}

TEST(PageStashTest, RefusesWhatIsNotPaged) {
  EXPECT_THROW(make_stash_pages(24), UserError);
  EXPECT_THROW(make_stash_pages(0), UserError);
  const OperatorPtr op = make_stash_pages(32);
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kF32, {3, 2}}}), UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{}), UserError);
  const OperatorPtr reload = make_reload_pages(32, ragged(DType::kF32, {3, 5}));
  const ValueType table{DType::kI32, {2}};
  EXPECT_EQ(reload->infer(std::vector<ValueType>{{DType::kI64, {1}}, table}).size(), 4);
  EXPECT_THROW(reload->infer(std::vector<ValueType>{{DType::kI32, {1}}, table}), UserError);
  EXPECT_THROW(reload->infer(std::vector<ValueType>{{DType::kI64, {1}}, {DType::kI32, {1}}}),
               UserError);
  EXPECT_EQ(most_pages(ragged(DType::kF32, {0, 2}), 32), 0);
  EXPECT_EQ(pages_of_rows(ragged(DType::kF32, {9, 4}), 3, 32), 2);
  EXPECT_EQ(pages_of_rows(ragged(DType::kF32, {9, 4}), 30, 32), 5) << "no more than the bound";
}

}  // namespace
}  // namespace tessera
