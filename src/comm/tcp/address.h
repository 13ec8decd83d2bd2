#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// An internet address and port as plain bytes, which ranks send to one another.
struct Address {
  std::array<uint8_t, 16> bytes{};  ///< network order; IPv4 uses the first four
  uint32_t scope = 0;               ///< the interface of a link-local IPv6 address
  uint16_t port = 0;
  uint16_t is_v6 = 0;

  bool operator==(const Address&) const = default;
  /// Of this machine alone.
  bool is_loopback() const;
  /// `10.0.0.3:4711`, `[fe80::1]:80`.
  std::string to_string() const;
};

/// What the calls of the operating system take.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_storage);

  sockaddr* data();
  const sockaddr* data() const;
};

SocketAddress to_socket_address(const Address& address);
/// IPv4 addresses that IPv6 sockets give (::ffff:10.0.0.3) become IPv4 again.
Address from_socket_address(const SocketAddress& address);

/// The addresses of a host name or of a number in text. Throws UserError.
std::vector<Address> resolve_host(const std::string& host, uint16_t port);
/// Those by which this machine alone is reached, and those that stand for all of its own.
std::vector<Address> loopback_addresses(uint16_t port);
std::vector<Address> any_addresses(uint16_t port);

}  // namespace tessera
