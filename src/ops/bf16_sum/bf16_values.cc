#include "ops/bf16_sum/bf16_values.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/dtype.h"

namespace tessera {
namespace {

// Values pass through blocks of their own, so that the compiler knows that nothing overlaps.
constexpr int64_t kBlock = 512;

template <typename T>
void load(const std::byte* from, int64_t first, int64_t count, std::array<T, kBlock>& block) {
  std::memcpy(block.data(), from + first * static_cast<int64_t>(sizeof(T)),
              static_cast<size_t>(count) * sizeof(T));
}

template <typename T>
void sum_parts_into(const std::byte* parts, int64_t num_parts, int64_t own, std::span<T> sum) {
  std::array<Bf16, kBlock> narrow;
  std::array<float, kBlock> total;
  const auto count = static_cast<int64_t>(sum.size());
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    T* const values = sum.data() + first;
    total.fill(0.0F);
    for (int64_t p = 0; p < num_parts; ++p) {
      if (p == own) {
        for (size_t i = 0; i < static_cast<size_t>(size); ++i) total[i] += Bf16(values[i]);
        continue;
      }
      load(parts, (p < own ? p : p - 1) * count + first, size, narrow);
      for (size_t i = 0; i < static_cast<size_t>(size); ++i) total[i] += narrow[i];
    }
    for (size_t i = 0; i < static_cast<size_t>(size); ++i) values[i] = T(total[i]);
  }
}

}  // namespace

void round_to_bf16(const std::byte* from, int64_t count, std::byte* to) {
  std::array<float, kBlock> wide;
  std::array<Bf16, kBlock> narrow;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    load(from, first, size, wide);
    for (size_t i = 0; i < static_cast<size_t>(size); ++i) narrow[i] = Bf16(wide[i]);
    std::memcpy(to + first * static_cast<int64_t>(sizeof(Bf16)), narrow.data(),
                static_cast<size_t>(size) * sizeof(Bf16));
  }
}

void sum_bf16_parts(const std::byte* parts, int64_t num_parts, int64_t own, std::span<float> sum) {
  sum_parts_into(parts, num_parts, own, sum);
}

void sum_bf16_parts(const std::byte* parts, int64_t num_parts, int64_t own, std::span<Bf16> sum) {
  sum_parts_into(parts, num_parts, own, sum);
}

}  // namespace tessera
