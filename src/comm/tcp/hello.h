#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

namespace tessera {

/// What a program says first, so that only ranks of one run and one version talk to one another.
/// All integers are in the machine's order: another order shows as another version.
inline constexpr std::array<char, 8> kTcpMagic = {'T', 'e', 's', 's', 'e', 'r', 'a', '\n'};
inline constexpr uint32_t kTcpVersion = 1;

/// Random bytes that rank 0 gives to those it let join, and which they show one another.
using TcpToken = std::array<uint8_t, 16>;
/// The beginning of the run's name, padded with zeros.
using RunName = std::array<char, 64>;

struct Hello {
  std::array<char, 8> magic = kTcpMagic;
  uint32_t version = kTcpVersion;
  uint32_t num_ranks = 0;
  uint32_t rank = 0;
  uint32_t port = 0;  ///< where this rank listens for the others
  RunName run{};
  TcpToken token{};  ///< zeros while the rank has none
};
static_assert(std::has_unique_object_representations_v<Hello>);

enum class Verdict : uint32_t {
  kWelcome = 1,
  kOtherVersion,
  kOtherRun,
  kOtherSize,
  kRankTaken,  ///< or not one that is expected here
};

struct Reply {
  std::array<char, 8> magic = kTcpMagic;
  uint32_t version = kTcpVersion;
  Verdict verdict = Verdict::kWelcome;
};
static_assert(sizeof(Reply) == 16);

/// What is wrong with `hello` for one who expects `expected`, rank and port aside.
Verdict judge(const Hello& hello, const Hello& expected);
/// `this is run "a" of 4 ranks`, for the message of a refusal.
std::string describe_refusal(Verdict verdict, const Hello& hello);

RunName make_run_name(const std::string& name);

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_bytes(std::span(&value, 1));
}
template <typename T>
std::span<std::byte> writable_bytes_of(T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_writable_bytes(std::span(&value, 1));
}

}  // namespace tessera
