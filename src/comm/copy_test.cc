#include "comm/copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "core/random.h"

namespace tessera {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes counted_bytes(int64_t count) {
  Bytes bytes(static_cast<size_t>(count));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7 + i / 251);
  return bytes;
}

TEST(CopyBytes, CopiesAnyLengthFromAndToAnyPlace) {
  constexpr int64_t kGuard = 100;
  Random random(5, 0);
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{4} << 20,
                              (int64_t{4} << 20) + 1, (int64_t{9} << 20) + 77}) {
    for (int round = 0; round < 3; ++round) {
      const auto from = static_cast<int64_t>(random.next_below(kGuard));
      const auto to = static_cast<int64_t>(random.next_below(kGuard));
      const Bytes source = counted_bytes(bytes + kGuard);
      Bytes target(source.size() + kGuard, 0xEE);
      copy_bytes(source.data() + from, target.data() + to, bytes);
      Bytes expected(target.size(), 0xEE);
      std::copy_n(source.begin() + from, bytes, expected.begin() + to);
      EXPECT_TRUE(target == expected) << bytes << " from " << from << " to " << to;
    }
  }
}

TEST(CopyBytes, RangesMayOverlap) {
  for (const int64_t shift : {0, 1, 64, 5000}) {
    const int64_t bytes = int64_t{5} << 20;
    const Bytes source = counted_bytes(bytes + shift);
    Bytes up = source;
    copy_bytes(up.data(), up.data() + shift, bytes);
    EXPECT_EQ(std::memcmp(up.data() + shift, source.data(), bytes), 0) << shift;
    Bytes down = source;
    copy_bytes(down.data() + shift, down.data(), bytes);
    EXPECT_EQ(std::memcmp(down.data(), source.data() + shift, bytes), 0) << shift;
  }
}

TEST(CopySlices, CoverAllBytes) {
  for (const int64_t bytes : {0, 1, 4095, 4096, 1 << 20, (3 << 20) + 5}) {
    for (int64_t slices = 1; slices < 9; ++slices) {
      EXPECT_EQ(copy_slice_begin(bytes, slices, 0), 0);
      EXPECT_EQ(copy_slice_begin(bytes, slices, slices), bytes);
      for (int64_t i = 0; i < slices; ++i)
        EXPECT_LE(copy_slice_begin(bytes, slices, i), copy_slice_begin(bytes, slices, i + 1));
    }
  }
  EXPECT_EQ(num_copy_slices(100), 1);
}

}  // namespace
}  // namespace tessera
