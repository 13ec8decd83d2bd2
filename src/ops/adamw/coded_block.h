#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "ops/adamw/moment_code.h"
#include "ops/cpu_dispatch.h"

/// Blocks of moments that share a scale, in F32 and back: for kernels on CPUs.
namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

template <typename Code>
void decode_block(const typename Code::Code* __restrict from, uint8_t scale, float* __restrict to,
                  int64_t n) {
  const uint32_t base = Code::base_of(scale);
  for (int64_t i = 0; i < n; ++i) to[i] = Code::decode(from[i], base);
}

/// The word of the largest magnitude.
inline uint32_t find_largest(const float* __restrict values, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffU);
  return largest;
}

/// Returns the scale. kBits takes of `random` what this moment is rounded with.
template <typename Code, uint32_t (*kBits)(uint32_t)>
uint8_t encode_block(const float* __restrict from, const uint32_t* __restrict random,
                     typename Code::Code* __restrict to, int64_t n) {
  const uint8_t scale = Code::scale_of(find_largest(from, n));
  const uint32_t base = Code::base_of(scale);
  for (int64_t i = 0; i < n; ++i)
    to[i] = Code::encode_stochastically(from[i], base, kBits(random[i]));
  return scale;
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
