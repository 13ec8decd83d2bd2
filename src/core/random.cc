#include "core/random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "core/philox.h"

namespace tessera {

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  const PhiloxWords words =
      philox_words({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  return std::to_array(words.of);
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

namespace {

constexpr size_t kPairs = 32;  // of normal numbers, made side by side

// Polynomials after Cephes (logf, sinf, cosf; the libm of S. Moshier), of F32's accuracy in these
// ranges: without branches or calls, so that loops over them become vector code. Weights are made
// at the start of every run, on every rank.

/// ln x of a normal x in (0, 1].
inline float log_unit(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const auto half = std::bit_cast<float>((bits & 0x007FFFFFU) | 0x3F000000U);  // [0.5, 1)
  const bool low = (bits & 0x007FFFFFU) < 0x003504F3U;                         // below sqrt(0.5)
  const auto exponent =
      static_cast<float>(static_cast<int32_t>(bits >> 23) - 126 - static_cast<int32_t>(low));
  const float m = half * static_cast<float>(1 + static_cast<int32_t>(low)) - 1.0F;
  const float z = m * m;
  float y = 7.0376836292E-2F;
  y = y * m - 1.1514610310E-1F;
  y = y * m + 1.1676998740E-1F;
  y = y * m - 1.2420140846E-1F;
  y = y * m + 1.4249322787E-1F;
  y = y * m - 1.6668057665E-1F;
  y = y * m + 2.0000714765E-1F;
  y = y * m - 2.4999993993E-1F;
  y = y * m + 3.3333331174E-1F;
  y = y * m * z - 2.12194440E-4F * exponent - 0.5F * z;
  return m + y + 0.693359375F * exponent;
}

/// cos and sin of 2 pi `turn`, turn in [0, 1).
inline void turn_by(float turn, float& cosine, float& sine) {
  const auto quadrant = static_cast<int32_t>(4.0F * turn + 0.5F);
  const float x = 2.0F * std::numbers::pi_v<float> * (turn - 0.25F * static_cast<float>(quadrant));
  const float z = x * x;
  const float s = ((-1.9515295891E-4F * z + 8.3321608736E-3F) * z - 1.6666654611E-1F) * z * x + x;
  const float c =
      ((2.4433157118E-5F * z - 1.3887316255E-3F) * z + 4.1666645683E-2F) * z * z - 0.5F * z + 1.0F;
  // Chosen and negated as bits: a branch would keep the loop from becoming vector code.
  const auto q = static_cast<uint32_t>(quadrant);
  const uint32_t swapped = 0U - (q & 1U);
  const auto sine_bits = std::bit_cast<uint32_t>(s);
  const auto cosine_bits = std::bit_cast<uint32_t>(c);
  cosine = std::bit_cast<float>(((sine_bits & swapped) | (cosine_bits & ~swapped)) ^
                                (((q + 1) & 2U) << 30));
  sine =
      std::bit_cast<float>(((cosine_bits & swapped) | (sine_bits & ~swapped)) ^ ((q & 2U) << 30));
}

/// Box and Muller's pairs, from two words each.
struct NormalPairs {
  std::array<uint32_t, kPairs> radius_words;
  std::array<uint32_t, kPairs> angle_words;
  std::array<float, kPairs> first;
  std::array<float, kPairs> second;

  void draw(uint64_t first_block, uint64_t seed, uint64_t stream) {
    for (size_t block = 0; block < kPairs / 2; ++block) {
      const auto words =
          philox({static_cast<uint32_t>(first_block + block), 0, static_cast<uint32_t>(stream),
                  static_cast<uint32_t>(stream >> 32)},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
      radius_words[2 * block] = words[0];
      angle_words[2 * block] = words[1];
      radius_words[2 * block + 1] = words[2];
      angle_words[2 * block + 1] = words[3];
    }
  }

  void transform(float deviation) {
    constexpr float kToUnit = 0x1.0p-24F;
    for (size_t i = 0; i < kPairs; ++i) {
      const float uniform =
          (static_cast<float>(static_cast<int32_t>(radius_words[i] >> 8)) + 0.5F) * kToUnit;
      const float turn = static_cast<float>(static_cast<int32_t>(angle_words[i] >> 8)) * kToUnit;
      const float radius = deviation * std::sqrt(-2.0F * log_unit(uniform));
      float cosine = 0;
      float sine = 0;
      turn_by(turn, cosine, sine);
      first[i] = radius * cosine;
      second[i] = radius * sine;
    }
  }
};

}  // namespace

void fill_normal(std::span<float> values, uint64_t seed, uint64_t stream, float deviation) {
  NormalPairs pairs;
  for (size_t begin = 0; begin < values.size(); begin += 2 * kPairs) {
    pairs.draw(begin / 4, seed, stream);
    pairs.transform(deviation);
    const size_t count = std::min(values.size() - begin, 2 * kPairs);
    for (size_t i = 0; i < count; ++i)
      values[begin + i] = i % 2 == 0 ? pairs.first[i / 2] : pairs.second[i / 2];
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
