#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace tessera {

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): 128 random
/// bits as a pure function of a 128-bit counter and a 64-bit key.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

/// A stream of random numbers that is a pure function of (seed, stream): two generators with the
/// same arguments give the same numbers, and `position` says how many 64-bit words have been drawn,
/// so that a stream can be resumed.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream, uint64_t position = 0)
      : seed_(seed), stream_(stream), position_(position) {}

  uint64_t next_u64();
  /// Uniform in [0, 1).
  double next_uniform() { return static_cast<double>(next_u64() >> 11) * 0x1.0p-53; }
  /// Uniform in [0, bound); bound > 0. Without modulo bias.
  uint64_t next_below(uint64_t bound);
  /// Standard normal, by Box and Muller; draws two words.
  double next_normal();
  uint64_t position() const { return position_; }

 private:
  uint64_t seed_;
  uint64_t stream_;
  uint64_t position_;
};

/// Fills with normal numbers of the given deviation: a pure function of (seed, stream) and the
/// place in the span.
void fill_normal(std::span<float> values, uint64_t seed, uint64_t stream, float deviation);

/// Mixes words into one stream number, so that names and indices can key a stream.
uint64_t mix(uint64_t a, uint64_t b);

/// A stable 64-bit hash of text (FNV-1a), the same on every machine and run.
uint64_t hash_text(const char* text, uint64_t length);

}  // namespace tessera
