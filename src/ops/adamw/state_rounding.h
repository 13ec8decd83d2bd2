#pragma once

#include <bit>
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "core/host_device.h"

/// How F32 values of the optimizer are kept in fewer bits. All of it works on the words of floats,
/// so that CPUs and GPUs do the same.
namespace tessera {

TESSERA_HOST_DEVICE constexpr bool is_nan_word(uint32_t word) {
  return (word & 0x7fffffffU) > 0x7f800000U;
}

/// 32 random bits for the roundings of one element in one update: a hash of what the update reads
/// (the last step is that of MurmurHash3, Appleby, 2011). So they depend neither on where the
/// element lies nor on who updates it, and every layout rounds alike; elements in which all of that
/// is the same are rounded together.
TESSERA_HOST_DEVICE constexpr uint32_t rounding_bits(uint32_t update, uint32_t grad, uint32_t m,
                                                     uint32_t v, uint32_t weight) {
  uint32_t hash = grad * 0x9e3779b1U + m * 0x85ebca77U + v * 0xc2b2ae3dU + weight * 0x27d4eb2fU +
                  update * 0x165667b1U;
  hash ^= hash >> 16U;
  hash *= 0x85ebca6bU;
  hash ^= hash >> 13U;
  hash *= 0xc2b2ae35U;
  return hash ^ (hash >> 16U);
}

/// Of these, 16 for each of the three values that may be rounded.
TESSERA_HOST_DEVICE constexpr uint32_t first_moment_bits(uint32_t random) {
  return random & 0xffffU;
}
TESSERA_HOST_DEVICE constexpr uint32_t second_moment_bits(uint32_t random) {
  return random >> 16U;
}
TESSERA_HOST_DEVICE constexpr uint32_t weight_bits(uint32_t random) {
  return (random * 0x9e3779b1U) >> 16U;
}

/// The BF16 number below or above the F32 one (in magnitude), the latter with the probability of
/// its distance: `random` has 16 bits. NaN stays NaN.
TESSERA_HOST_DEVICE constexpr uint16_t round_stochastically(uint32_t word, uint32_t random) {
  const uint32_t sum = is_nan_word(word) ? word | 0x400000U : word + random;
  return static_cast<uint16_t>(sum >> 16U);
}

/// The F32 number next to one that lies halfway between two BF16 numbers, on the side to which
/// rounding to even takes it; any other number itself. Only of these can the upper half be told
/// from the rounded number and the lower half.
TESSERA_HOST_DEVICE constexpr uint32_t leave_halfway(uint32_t word) {
  if ((word & 0xffffU) != 0x8000U) return word;
  return (word & 0x10000U) != 0 ? word + 1 : word - 1;
}

/// The word whose rounded BF16 number and lower half these are, as leave_halfway left it.
TESSERA_HOST_DEVICE constexpr uint32_t join_halves(uint16_t rounded, uint16_t lower) {
  const uint32_t upper = static_cast<uint32_t>(rounded) - (lower > 0x8000U ? 1U : 0U);
  return (upper << 16U) | lower;
}

/// The F32 number of 24 bits below or above another one (in magnitude), as round_stochastically, by
/// the lower 8 bits of `random`. Where that lies halfway between two BF16 numbers, bit 8 says to
/// which side it goes, so that the average stays. NaN stays NaN.
TESSERA_HOST_DEVICE constexpr uint32_t round_to_24_bits(uint32_t word, uint32_t random) {
  if (is_nan_word(word)) return (word | 0x400000U) & 0xffffff00U;
  const uint32_t kept = (word + (random & 0xffU)) & 0xffffff00U;
  if ((kept & 0xffffU) != 0x8000U) return kept;
  return (random & 0x100U) != 0 ? kept + 0x100U : kept - 0x100U;
}

/// The nearest such number that rounds to the same BF16 number.
TESSERA_HOST_DEVICE constexpr uint32_t nearest_24_bits(uint32_t word) {
  if (is_nan_word(word)) return (word | 0x400000U) & 0xffffff00U;
  const uint32_t kept = (word + 0x80U) & 0xffffff00U;
  if ((kept & 0xffffU) != 0x8000U) return kept;
  const bool above = word > kept || (word == kept && (word & 0x10000U) != 0);
  return above ? kept + 0x100U : kept - 0x100U;
}

/// Of the remainder's type, U16 or U8: the word that a master becomes when it is kept as a BF16
/// weight and a remainder; the remainder; and the lower half that a remainder stands for.
template <typename Remainder>
TESSERA_HOST_DEVICE constexpr uint32_t word_with_remainder(uint32_t word, uint32_t random) {
  return sizeof(Remainder) == 2 ? leave_halfway(word) : round_to_24_bits(word, random);
}
template <typename Remainder>
TESSERA_HOST_DEVICE constexpr Remainder remainder_of(uint32_t word) {
  return static_cast<Remainder>((word & 0xffffU) >> (16 - 8 * sizeof(Remainder)));
}
template <typename Remainder>
TESSERA_HOST_DEVICE constexpr uint16_t lower_half(Remainder remainder) {
  return static_cast<uint16_t>(remainder << (16 - 8 * sizeof(Remainder)));
}

/// Masters, of remainders beside their BF16 weights.
template <typename Remainder>
void join_masters(std::span<const Bf16> weights, std::span<const Remainder> remainders,
                  std::span<float> masters) {
  for (size_t i = 0; i < masters.size(); ++i)
    masters[i] = std::bit_cast<float>(join_halves(weights[i].bits, lower_half(remainders[i])));
}

/// The other way: masters become the nearest that a weight and a remainder tell.
template <typename Remainder>
void split_masters(std::span<const float> masters, std::span<Bf16> weights,
                   std::span<Remainder> remainders) {
  for (size_t i = 0; i < masters.size(); ++i) {
    const auto master = std::bit_cast<uint32_t>(masters[i]);
    const uint32_t word = sizeof(Remainder) == 2 ? leave_halfway(master) : nearest_24_bits(master);
    weights[i] = Bf16(std::bit_cast<float>(word));
    remainders[i] = remainder_of<Remainder>(word);
  }
}

}  // namespace tessera
