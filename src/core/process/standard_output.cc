#include "core/process/standard_output.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <streambuf>
#include <string_view>

#include "core/file/file.h"

namespace tessera {
namespace {

constexpr size_t kHeldBack = size_t{64} << 10;

/// Writes all of it; the error number, or 0.
int write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(written);
      continue;
    }
    const int error = errno;
    if (error == EAGAIN) {
      pollfd state{descriptor, POLLOUT, 0};
      ::poll(&state, 1, -1);
    } else if (error != EINTR) {
      return error;
    }
  }
  return 0;
}

std::string describe_loss(int error) {
  if (error == EBADF)
    return "standard output is closed; give it somewhere to go, if only /dev/null";
  if (error == EPIPE || error == EIO) {
    return fmt::format("standard output: {}; nobody reads it any more", describe_errno(error));
  }
  return fmt::format("standard output: {}", describe_errno(error));
}

}  // namespace

/// Has no put area, so that each write comes here and can be guarded by the mutex.
class StandardOutput::Buffer : public std::streambuf {
 public:
  Buffer(int descriptor, std::ostream& errors)
      : descriptor_(descriptor), errors_(errors), is_terminal_(::isatty(descriptor) == 1) {}

  void keep_going(const std::string& promise) {
    const std::lock_guard lock(mutex_);
    promise_ = promise;
    keeps_going_ = true;
  }

  int finish(int code) noexcept {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
    flush();
    // A network's file system may tell only now that the disk is full.
    const int copy = lost_ ? -1 : ::dup(descriptor_);
    if (copy >= 0 && ::close(copy) != 0 && errno != EINTR) lose(errno);
    finished_ = true;
    return missed_ && code == 0 ? 1 : code;
  }

 protected:
  std::streamsize xsputn(const char* text, std::streamsize count) override {
    const std::lock_guard lock(mutex_);
    const std::string_view added(text, count);
    if (!finished_ && !reader_left_) held_ += added;
    const bool ends_line = is_terminal_ && added.find('\n') != std::string_view::npos;
    if (ends_line || held_.size() >= kHeldBack) flush();
    return count;
  }

  int_type overflow(int_type c) override {
    if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
    const char letter = traits_type::to_char_type(c);
    xsputn(&letter, 1);
    return c;
  }

  int sync() override {
    const std::lock_guard lock(mutex_);
    flush();
    return 0;
  }

 private:
  void flush() {
    const std::string text = std::exchange(held_, {});
    if (text.empty()) return;
    if (const int error = write_all(descriptor_, text); error != 0) lose(error);
  }

  void lose(int error) {
    const bool first = !lost_;
    lost_ = true;
    reader_left_ = error == EPIPE || (error == EIO && is_terminal_);
    missed_ = missed_ || !reader_left_;
    if (!keeps_going_ && !is_ending_) {
      finished_ = true;  // what destructors write on the way out must not throw again
      throw OutputLost(describe_loss(error), reader_left_);
    }
    if (first && !finished_ && (missed_ || keeps_going_))
      errors_ << fmt::format("tessera: {}{}\n", describe_loss(error), promise_) << std::flush;
  }

  std::mutex mutex_;
  int descriptor_;
  std::ostream& errors_;
  bool is_terminal_;
  std::string held_;
  bool keeps_going_ = false;
  std::string promise_;
  bool lost_ = false;
  bool reader_left_ = false;
  bool missed_ = false;     ///< by somebody: not only its reader left
  bool is_ending_ = false;  ///< no exception can pass
  bool finished_ = false;
};

StandardOutput::StandardOutput(std::ostream& stream, int descriptor, std::ostream& errors)
    : stream_(stream),
      before_(stream.rdbuf()),
      exceptions_(stream.exceptions()),
      buffer_(std::make_unique<Buffer>(descriptor, errors)) {
  stream_.rdbuf(buffer_.get());
  stream_.exceptions(std::ios_base::badbit);  // so that the buffer's own exceptions pass
}

StandardOutput::~StandardOutput() {
  finish(0);
  stream_.exceptions(std::ios_base::goodbit);
  stream_.rdbuf(before_);
  stream_.clear();
  stream_.exceptions(exceptions_);
}

void StandardOutput::keep_going(const std::string& promise) {
  buffer_->keep_going(promise);
}

int StandardOutput::finish(int code) noexcept {
  return buffer_->finish(code);
}

}  // namespace tessera
