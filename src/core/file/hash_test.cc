#include "core/file/hash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/random.h"

namespace tessera {
namespace {

std::vector<std::byte> counted_bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 % 256);
  return bytes;
}

// Expected values from the reference implementation (Python's xxhash 3).
TEST(Hash64, EqualsTheReference) {
  const std::vector<std::pair<size_t, uint64_t>> kExpected = {
      {0, 0xef46db3751d8e999},  {1, 0xe934a84adb052768},  {3, 0x9ff70a635a6209ab},
      {4, 0xae5acdc00a55ac41},  {8, 0x87116b3365b924eb},  {31, 0x0f187c62b1e722b7},
      {32, 0x91b0cb0931a8c629}, {33, 0x931b043cf8d65b94}, {64, 0xbf3052e3445775d0},
      {101, 0x42312f4d55d9bd17}};
  for (const auto& [count, hash] : kExpected)
    EXPECT_EQ(hash64(counted_bytes(count)), hash) << count;
}

TEST(Hash64, DoesNotDependOnHowBytesArrive) {
  Random random(1, 2);
  for (int trial = 0; trial < 200; ++trial) {
    const auto bytes = counted_bytes(random.next_below(300));
    Hash64 hash;
    for (size_t begin = 0; begin < bytes.size();) {
      const size_t count = std::min<size_t>(random.next_below(70), bytes.size() - begin);
      hash.update(std::span(bytes).subspan(begin, count));
      begin += count;
    }
    EXPECT_EQ(hash.digest(), hash64(bytes));
  }
}

}  // namespace
}  // namespace tessera
