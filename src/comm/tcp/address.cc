#include "comm/tcp/address.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace tessera {
namespace {

constexpr size_t kV4Bytes = 4;
constexpr size_t kMappedPrefix = 12;

sockaddr_in read_v4(const SocketAddress& address) {
  sockaddr_in v4{};
  std::memcpy(&v4, &address.storage, sizeof(v4));
  return v4;
}

sockaddr_in6 read_v6(const SocketAddress& address) {
  sockaddr_in6 v6{};
  std::memcpy(&v6, &address.storage, sizeof(v6));
  return v6;
}

std::vector<Address> look_up(const char* host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  require(code == 0, "no address is known: {}", gai_strerror(code));
  std::vector<Address> addresses;
  for (const addrinfo* item = list; item != nullptr; item = item->ai_next) {
    SocketAddress raw;
    raw.length = item->ai_addrlen;
    std::memcpy(&raw.storage, item->ai_addr, item->ai_addrlen);
    addresses.push_back(from_socket_address(raw));
  }
  freeaddrinfo(list);
  return addresses;
}

}  // namespace

bool Address::is_loopback() const {
  constexpr uint8_t kLoopbackNet = 127;
  constexpr std::array<uint8_t, 16> kLoopback6 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  return is_v6 != 0 ? bytes == kLoopback6 : bytes[0] == kLoopbackNet;
}

std::string Address::to_string() const {
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(is_v6 != 0 ? AF_INET6 : AF_INET, bytes.data(), text.data(), text.size());
  return fmt::format("{}{}{}:{}", is_v6 != 0 ? "[" : "", text.data(), is_v6 != 0 ? "]" : "", port);
}

sockaddr* SocketAddress::data() {
  return reinterpret_cast<sockaddr*>(&storage);
}

const sockaddr* SocketAddress::data() const {
  return reinterpret_cast<const sockaddr*>(&storage);
}

SocketAddress to_socket_address(const Address& address) {
  SocketAddress raw;
  if (address.is_v6 != 0) {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(address.port);
    v6.sin6_scope_id = address.scope;
    std::memcpy(&v6.sin6_addr, address.bytes.data(), address.bytes.size());
    raw.length = sizeof(v6);
    std::memcpy(&raw.storage, &v6, sizeof(v6));
  } else {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(address.port);
    std::memcpy(&v4.sin_addr, address.bytes.data(), kV4Bytes);
    raw.length = sizeof(v4);
    std::memcpy(&raw.storage, &v4, sizeof(v4));
  }
  return raw;
}

Address from_socket_address(const SocketAddress& address) {
  Address plain;
  if (address.storage.ss_family == AF_INET) {
    const sockaddr_in v4 = read_v4(address);
    std::memcpy(plain.bytes.data(), &v4.sin_addr, kV4Bytes);
    plain.port = ntohs(v4.sin_port);
    return plain;
  }
  ensure(address.storage.ss_family == AF_INET6, "an address of family {}",
         address.storage.ss_family);
  const sockaddr_in6 v6 = read_v6(address);
  const uint8_t* bytes = v6.sin6_addr.s6_addr;
  plain.port = ntohs(v6.sin6_port);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    std::copy_n(bytes + kMappedPrefix, kV4Bytes, plain.bytes.begin());
    return plain;
  }
  std::copy_n(bytes, plain.bytes.size(), plain.bytes.begin());
  plain.is_v6 = 1;
  plain.scope = v6.sin6_scope_id;
  return plain;
}

std::vector<Address> resolve_host(const std::string& host, uint16_t port) {
  return look_up(host.c_str(), port, 0);
}

std::vector<Address> loopback_addresses(uint16_t port) {
  return look_up(nullptr, port, 0);
}

std::vector<Address> any_addresses(uint16_t port) {
  std::vector<Address> addresses = look_up(nullptr, port, AI_PASSIVE);
  // The IPv6 one takes IPv4 as well.
  std::ranges::stable_sort(addresses, std::greater{}, &Address::is_v6);
  return addresses;
}

}  // namespace tessera
