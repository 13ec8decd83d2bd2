#include "core/file/hash.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

template <typename Word>
uint64_t load(const std::byte* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

uint64_t add_word(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

uint64_t merge_lane(uint64_t hash, uint64_t lane) {
  return (hash ^ add_word(0, lane)) * kPrime1 + kPrime4;
}

uint64_t add_tail(uint64_t hash, std::span<const std::byte> tail) {
  for (; tail.size() >= 8; tail = tail.subspan(8)) {
    hash = std::rotl(hash ^ add_word(0, load<uint64_t>(tail.data())), 27) * kPrime1 + kPrime4;
  }
  if (tail.size() >= 4) {
    hash = std::rotl(hash ^ (load<uint32_t>(tail.data()) * kPrime1), 23) * kPrime2 + kPrime3;
    tail = tail.subspan(4);
  }
  for (const std::byte byte : tail) {
    hash = std::rotl(hash ^ (std::to_integer<uint64_t>(byte) * kPrime5), 11) * kPrime1;
  }
  return hash;
}

uint64_t avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace

Hash64::Hash64() : lanes_{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1} {}

void Hash64::consume(const std::byte* stripe) {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i] = add_word(lanes_[i], load<uint64_t>(stripe + 8 * i));
  }
}

void Hash64::update(std::span<const std::byte> bytes) {
  num_bytes_ += bytes.size();
  if (num_pending_ > 0) {
    const size_t taken = std::min(kStripe - num_pending_, bytes.size());
    std::copy_n(bytes.begin(), taken, pending_.begin() + num_pending_);
    num_pending_ += taken;
    bytes = bytes.subspan(taken);
    if (num_pending_ < kStripe) return;
    consume(pending_.data());
    num_pending_ = 0;
  }
  for (; bytes.size() >= kStripe; bytes = bytes.subspan(kStripe)) consume(bytes.data());
  std::copy(bytes.begin(), bytes.end(), pending_.begin());
  num_pending_ = bytes.size();
}

uint64_t Hash64::digest() const {
  uint64_t hash = kPrime5;
  if (num_bytes_ >= kStripe) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
           std::rotl(lanes_[3], 18);
    for (const uint64_t lane : lanes_) hash = merge_lane(hash, lane);
  }
  return avalanche(add_tail(hash + num_bytes_, std::span(pending_).first(num_pending_)));
}

uint64_t hash64(std::span<const std::byte> bytes) {
  Hash64 hash;
  hash.update(bytes);
  return hash.digest();
}

}  // namespace tessera
