#include "core/random.h"

#include <cmath>
#include <numbers>

namespace tessera {

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9;
  constexpr uint32_t kWeyl1 = 0xBB67AE85;
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

uint64_t Random::next_u64() {
  const uint64_t block = position_ / 2;
  const auto words = philox({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                             static_cast<uint32_t>(stream_), static_cast<uint32_t>(stream_ >> 32)},
                            {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
  const size_t half = position_ % 2 == 0 ? 0 : 2;
  ++position_;
  return (static_cast<uint64_t>(words[half + 1]) << 32) | words[half];
}

uint64_t Random::next_below(uint64_t bound) {
  const uint64_t limit = UINT64_MAX - UINT64_MAX % bound;
  uint64_t word = next_u64();
  while (word >= limit) word = next_u64();
  return word % bound;
}

double Random::next_normal() {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - next_uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * next_uniform());
}

void fill_normal(std::span<float> values, uint64_t seed, uint64_t stream, float deviation) {
  constexpr float kToUnit = 0x1.0p-24F;
  for (size_t i = 0; i < values.size(); i += 4) {
    const auto words = philox({static_cast<uint32_t>(i / 4), 0, static_cast<uint32_t>(stream),
                               static_cast<uint32_t>(stream >> 32)},
                              {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    for (size_t pair = 0; pair < 2 && i + 2 * pair < values.size(); ++pair) {
      const float uniform = (static_cast<float>(words[2 * pair] >> 8) + 0.5F) * kToUnit;
      const float angle =
          2.0F * std::numbers::pi_v<float> * static_cast<float>(words[2 * pair + 1] >> 8) * kToUnit;
      const float radius = deviation * std::sqrt(-2.0F * std::log(uniform));
      values[i + 2 * pair] = radius * std::cos(angle);
      if (i + 2 * pair + 1 < values.size()) values[i + 2 * pair + 1] = radius * std::sin(angle);
    }
  }
}

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15ULL + b + 0x632BE59BD9B4E019ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

uint64_t hash_text(const char* text, uint64_t length) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (uint64_t i = 0; i < length; ++i)
    hash = (hash ^ static_cast<uint8_t>(text[i])) * 0x100000001b3ULL;
  return hash;
}

}  // namespace tessera
