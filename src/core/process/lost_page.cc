#include "core/process/lost_page.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <string_view>

#include "core/exit_code.h"

// All but the class runs in a handler: no memory is allocated, and only system calls are made.
namespace tessera {
namespace {

/// The lines of /proc/self/maps, one after the other.
class MapLines {
 public:
  MapLines() : file_(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC)) {}
  ~MapLines() {
    if (file_ >= 0) ::close(file_);
  }
  MapLines(const MapLines&) = delete;
  MapLines& operator=(const MapLines&) = delete;

  /// Empty at the end. Valid until the next call. What does not fit is left out.
  std::string_view next() {
    size_t length = 0;
    for (int c = next_char(); c >= 0 && c != '\n'; c = next_char()) {
      if (length < line_.size()) line_[length++] = static_cast<char>(c);
    }
    return {line_.data(), length};
  }

 private:
  int next_char() {
    if (at_ == count_) {
      at_ = 0;
      count_ = file_ < 0 ? 0 : ::read(file_, buffer_.data(), buffer_.size());
      if (count_ <= 0) {
        count_ = 0;
        return -1;
      }
    }
    return static_cast<unsigned char>(buffer_[at_++]);
  }

  int file_;
  std::array<char, 512> buffer_;
  std::array<char, 4352> line_;  // the longest path and what stands before it
  ssize_t at_ = 0;
  ssize_t count_ = 0;
};

/// Takes a hexadecimal number and the sign behind it.
uint64_t take_hex(std::string_view& text) {
  uint64_t value = 0;
  while (!text.empty()) {
    const char c = text.front();
    text.remove_prefix(1);
    if (c >= '0' && c <= '9') {
      value = value * 16 + static_cast<uint64_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      value = value * 16 + static_cast<uint64_t>(c - 'a' + 10);
    } else {
      break;
    }
  }
  return value;
}

void print(std::string_view text) {
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0) return;
}

/// Ends the process where the address is in a file's mapping.
void end_for_file(uint64_t address) {
  MapLines lines;
  for (std::string_view line = lines.next(); !line.empty(); line = lines.next()) {
    const uint64_t begin = take_hex(line);
    const uint64_t end = take_hex(line);
    if (address < begin || address >= end) continue;
    const size_t path = line.find('/');
    if (path == std::string_view::npos || line.substr(path).starts_with("/memfd:")) return;
    print("tessera: cannot read ");
    print(line.substr(path));
    print(
        ": it was cut while it was in use, or its disk failed; put it back as it was, and repeat "
        "the command\n");
    ::_exit(kUserErrorCode);
  }
}

void handle(int signal, siginfo_t* info, void* /*context*/) {
  if (info->si_code == BUS_ADRERR) end_for_file(reinterpret_cast<uintptr_t>(info->si_addr));
  std::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

LostPageMessage::LostPageMessage() {
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &before_);
}

LostPageMessage::~LostPageMessage() {
  sigaction(SIGBUS, &before_, nullptr);
}

}  // namespace tessera
