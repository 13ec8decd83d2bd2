#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>

#include "comm/tcp/address.h"

namespace tessera {

using TcpClock = std::chrono::steady_clock;

/// Owns a descriptor; move-only. Sockets here never block: whoever waits does it with a deadline.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

/// Listens on the first address that can be had; port 0: any free one. Throws UserError.
Socket listen_on(const std::vector<Address>& addresses);
/// A connection that has come.
struct Accepted {
  Socket socket;
  Address address;  ///< of the other end
};
/// The next, if any.
std::optional<Accepted> accept_one(const Socket& listener);
/// Throws UserError where nobody answers.
Socket connect_to(const Address& address, TcpClock::time_point deadline);

Address local_address(const Socket& socket);
Address peer_address(const Socket& socket);

/// Whether something comes, or the other end is closed, before the deadline.
bool wait_readable(const Socket& socket, TcpClock::time_point deadline);
/// All of `bytes` go or come before the deadline. Throws UserError.
void send_all(const Socket& socket, std::span<const std::byte> bytes,
              TcpClock::time_point deadline);
void receive_all(const Socket& socket, std::span<std::byte> bytes, TcpClock::time_point deadline);

/// Messages go at once, and a machine that vanishes is noticed in about a minute.
void tune(const Socket& socket);

/// The first whose other end was closed.
std::optional<size_t> find_closed(std::span<const int> descriptors);

/// A time limit, or one that the clock's numbers can hold.
TcpClock::duration to_duration(double seconds);

/// What poll() may wait, in ms, until the deadline.
int milliseconds_until(TcpClock::time_point deadline);

/// The text of errno.
std::string system_error();

}  // namespace tessera
