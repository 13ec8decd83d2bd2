#include "comm/tcp/socket.h"

#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace tessera {
namespace {

constexpr int kBacklog = 4096;  // the kernel lowers it to its own limit

// A peer that is silent for the first time is asked again at this interval, this many times.
constexpr int kIdleSeconds = 30;
constexpr int kAskSeconds = 10;
constexpr int kAsks = 3;

void set_option(const Socket& socket, int level, int option, int value) {
  const int code = setsockopt(socket.get(), level, option, &value, sizeof(value));
  ensure(code == 0, "setsockopt {} {}: {}", level, option, system_error());
}

// Connections that were closed a moment ago do not keep a port from who listens next. Empty where
// the system has none of this kind; errno says why.
Socket open_socket(const Address& address) {
  Socket socket(::socket(address.is_v6 != 0 ? AF_INET6 : AF_INET,
                         SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (socket) set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  return socket;
}

// Nothing where the address cannot be had; errno says why.
std::optional<Socket> try_listen(const Address& address) {
  Socket socket = open_socket(address);
  if (!socket) return std::nullopt;
  if (address.is_v6 != 0) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  const SocketAddress raw = to_socket_address(address);
  if (bind(socket.get(), raw.data(), raw.length) != 0) return std::nullopt;
  if (listen(socket.get(), kBacklog) != 0) return std::nullopt;
  return socket;
}

bool wait_for(const Socket& socket, short events, TcpClock::time_point deadline) {
  pollfd state{socket.get(), events, 0};
  while (true) {
    const int count = poll(&state, 1, milliseconds_until(deadline));
    if (count > 0) return true;
    if (count == 0 && TcpClock::now() >= deadline) return false;
    require(count == 0 || errno == EINTR, "poll: {}", system_error());
  }
}

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

std::string system_error() {
  return std::strerror(errno);
}

Socket::Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Socket::~Socket() {
  if (descriptor_ >= 0) close(descriptor_);
}

TcpClock::duration to_duration(double seconds) {
  constexpr double kLongestSeconds = 1e8;  // what the clock's nanoseconds can hold
  const std::chrono::duration<double> limit(std::min(seconds, kLongestSeconds));
  return std::chrono::duration_cast<TcpClock::duration>(limit);
}

int milliseconds_until(TcpClock::time_point deadline) {
  // In steps, since a time limit may be longer than poll() counts.
  constexpr int64_t kStep = 60'000;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - TcpClock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, kStep));
}

Socket listen_on(const std::vector<Address>& addresses) {
  std::string problem = "there is no address";
  for (const Address& address : addresses) {
    if (std::optional<Socket> socket = try_listen(address)) return std::move(*socket);
    problem = fmt::format("{}: {}", address.to_string(), system_error());
  }
  user_error("cannot listen at {}", problem);
}

std::optional<Accepted> accept_one(const Socket& listener) {
  SocketAddress raw;
  Socket socket(accept4(listener.get(), raw.data(), &raw.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket) return std::nullopt;
  return Accepted{std::move(socket), from_socket_address(raw)};
}

Socket connect_to(const Address& address, TcpClock::time_point deadline) {
  Socket socket = open_socket(address);
  require(static_cast<bool>(socket), "no socket: {}", system_error());
  const SocketAddress raw = to_socket_address(address);
  int error = connect(socket.get(), raw.data(), raw.length) == 0 ? 0 : errno;
  if (error == EINPROGRESS || error == EINTR) {
    require(wait_for(socket, POLLOUT, deadline), "no answer");
    socklen_t length = sizeof(error);
    getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  require(error == 0, "{}", std::strerror(error));
  // Where nobody listens the system may choose the port as the socket's own: TCP's simultaneous
  // opening, with itself.
  require(local_address(socket) != peer_address(socket), "{}", std::strerror(ECONNREFUSED));
  return socket;
}

Address local_address(const Socket& socket) {
  SocketAddress raw;
  require(getsockname(socket.get(), raw.data(), &raw.length) == 0, "getsockname: {}",
          system_error());
  return from_socket_address(raw);
}

Address peer_address(const Socket& socket) {
  SocketAddress raw;
  require(getpeername(socket.get(), raw.data(), &raw.length) == 0, "{}", system_error());
  return from_socket_address(raw);
}

bool wait_readable(const Socket& socket, TcpClock::time_point deadline) {
  return wait_for(socket, POLLIN, deadline);
}

void send_all(const Socket& socket, std::span<const std::byte> bytes,
              TcpClock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t count = send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    require(count >= 0 || would_block(), "{}", system_error());
    if (count > 0) bytes = bytes.subspan(count);
    require(bytes.empty() || wait_for(socket, POLLOUT, deadline), "no answer");
  }
}

void receive_all(const Socket& socket, std::span<std::byte> bytes, TcpClock::time_point deadline) {
  while (!bytes.empty()) {
    require(wait_for(socket, POLLIN, deadline), "no answer");
    const ssize_t count = recv(socket.get(), bytes.data(), bytes.size(), 0);
    require(count != 0, "the connection was closed");
    require(count > 0 || would_block(), "{}", system_error());
    if (count > 0) bytes = bytes.subspan(count);
  }
}

void tune(const Socket& socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, kAskSeconds);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, kAsks);
}

std::optional<size_t> find_closed(std::span<const int> descriptors) {
  std::vector<pollfd> states;
  for (const int descriptor : descriptors) states.push_back({descriptor, POLLRDHUP, 0});
  if (poll(states.data(), states.size(), 0) <= 0) return std::nullopt;
  const auto closed = std::ranges::find_if(states, [](const pollfd& s) { return s.revents != 0; });
  return closed - states.begin();
}

}  // namespace tessera
