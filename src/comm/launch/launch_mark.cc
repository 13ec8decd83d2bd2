#include "comm/launch/launch_mark.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>

namespace tessera {
namespace {

constexpr socklen_t kNameOffset = offsetof(sockaddr_un, sun_path) + 1;  // it begins with a zero

FileDescriptor open_socket() {
  return FileDescriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

LaunchMark::LaunchMark() : socket_(open_socket()) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  // Without a name the system chooses one, which no file stands for.
  if (!socket_ || ::bind(socket_.get(), raw, sizeof(sa_family_t)) != 0) return;
  if (::getsockname(socket_.get(), raw, &length) != 0 || length <= kNameOffset) return;
  name_.assign(address.sun_path + 1, length - kNameOffset);
}

bool LaunchMark::came() const {
  char byte = 0;
  return socket_ && ::recv(socket_.get(), &byte, 1, MSG_PEEK) > 0;
}

void send_launch_mark(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  name.copy(address.sun_path + 1, length);
  const FileDescriptor socket = open_socket();
  const char byte = 1;
  if (!socket) return;
  ::sendto(socket.get(), &byte, 1, 0, reinterpret_cast<const sockaddr*>(&address),
           kNameOffset + static_cast<socklen_t>(length));
}

}  // namespace tessera
