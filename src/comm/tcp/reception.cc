#include "comm/tcp/reception.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <iostream>
#include <vector>

namespace tessera {
namespace {

constexpr std::chrono::seconds kVisitorPatience{10};
// Visitors that say nothing are sent away in time.
constexpr std::chrono::milliseconds kLook{200};

}  // namespace

void Reception::wait(TcpClock::time_point deadline, std::span<const int> watched) const {
  std::vector<pollfd> states = {{listener_.get(), POLLIN, 0}};
  for (const Visitor& visitor : visitors_)
    states.push_back({visitor.guest.socket.get(), POLLIN, 0});
  for (const int descriptor : watched) states.push_back({descriptor, POLLRDHUP, 0});
  poll(states.data(), states.size(),
       milliseconds_until(std::min(deadline, TcpClock::now() + kLook)));
}

void Reception::accept_all() {
  while (std::optional<Accepted> accepted = accept_one(listener_)) {
    Visitor visitor;
    visitor.guest.address = accepted->address;
    visitor.guest.socket = std::move(accepted->socket);
    visitor.patience = TcpClock::now() + kVisitorPatience;
    visitors_.push_back(std::move(visitor));
  }
}

void Reception::hear(Visitor& visitor) {
  const auto left = writable_bytes_of(visitor.guest.hello).subspan(visitor.num_bytes);
  const ssize_t count = recv(visitor.guest.socket.get(), left.data(), left.size(), 0);
  if (count > 0) visitor.num_bytes += static_cast<size_t>(count);
  const bool ended = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
  const size_t num_magic = std::min(visitor.num_bytes, kTcpMagic.size());
  const bool foreign = !std::equal(kTcpMagic.begin(), kTcpMagic.begin() + num_magic,
                                   visitor.guest.hello.magic.begin());
  visitor.gone = foreign || ended || TcpClock::now() > visitor.patience;
  if (visitor.gone) report_stranger(visitor.guest.address, "it does not say what a rank says");
}

std::optional<Guest> Reception::take_heard() {
  const auto heard = std::ranges::find_if(
      visitors_, [](const Visitor& v) { return !v.gone && v.num_bytes == sizeof(Hello); });
  if (heard == visitors_.end()) return std::nullopt;
  Guest guest = std::move(heard->guest);
  visitors_.erase(heard);
  return guest;
}

std::optional<Guest> Reception::next(TcpClock::time_point deadline, std::span<const int> watched) {
  while (true) {
    if (std::optional<Guest> guest = take_heard()) return guest;
    if (TcpClock::now() >= deadline || find_closed(watched)) return std::nullopt;
    wait(deadline, watched);
    accept_all();
    for (Visitor& visitor : visitors_) {
      if (visitor.num_bytes < sizeof(Hello)) hear(visitor);
    }
    std::erase_if(visitors_, [](const Visitor& visitor) { return visitor.gone; });
  }
}

void Reception::report_stranger(const Address& address, const std::string& why) {
  if (reported_) return;
  reported_ = true;
  std::cerr << fmt::format(
                   "tessera: rank {} turned away {}, which connected to {}: {}; more such are "
                   "turned away in silence\n",
                   rank_, address.to_string(), this->address().to_string(), why)
            << std::flush;
}

}  // namespace tessera
