#pragma once

#include <list>
#include <optional>
#include <span>

#include "comm/tcp/hello.h"
#include "comm/tcp/socket.h"

namespace tessera {

/// A rank that connected.
struct Guest {
  Socket socket;
  Address address;
  Hello hello;
};

/// Accepts connections and hears what each says first. All are heard at once, so a stranger that
/// says nothing keeps nobody waiting. Strangers are turned away, the first of them with a message
/// on standard error.
class Reception {
 public:
  Reception(Socket listener, int64_t rank) : listener_(std::move(listener)), rank_(rank) {}

  Address address() const { return local_address(listener_); }
  /// The next that speaks Tessera's protocol, of whatever version and run. Nothing where the
  /// deadline passes, or the other end of one of `watched` was closed.
  std::optional<Guest> next(TcpClock::time_point deadline, std::span<const int> watched);
  /// Says that whoever is at `address` was turned away, unless another was before.
  void report_stranger(const Address& address, const std::string& why);

 private:
  struct Visitor {
    Guest guest;
    size_t num_bytes = 0;  ///< of the hello that have come
    TcpClock::time_point patience;
    bool gone = false;
  };

  void wait(TcpClock::time_point deadline, std::span<const int> watched) const;
  void accept_all();
  void hear(Visitor& visitor);
  std::optional<Guest> take_heard();

  Socket listener_;
  int64_t rank_;
  std::list<Visitor> visitors_;
  bool reported_ = false;
};

}  // namespace tessera
