#pragma once

#include <cstdint>
#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>

namespace tessera {

/// Text for standard output that did not get there.
class OutputLost : public std::runtime_error {
 public:
  OutputLost(const std::string& what, bool reader_left)
      : std::runtime_error(what), reader_left_(reader_left) {}
  /// The reader of a pipe or the terminal has gone, so that nobody misses the text.
  bool reader_left() const { return reader_left_; }

 private:
  bool reader_left_;
};

/// Takes over a stream, std::cout as a rule, for the life of the process: what is written reaches
/// the descriptor or is missed aloud. Text is held back until a flush, 64 KiB or, on a terminal,
/// the end of a line. May be written from several threads.
class StandardOutput {
 public:
  /// The stream writes to `descriptor`; losses that nothing else tells go to `errors`.
  StandardOutput(std::ostream& stream, int descriptor, std::ostream& errors);
  ~StandardOutput();
  StandardOutput(const StandardOutput&) = delete;
  StandardOutput& operator=(const StandardOutput&) = delete;

  /// From now on a loss is told once, followed by `promise`, and the program goes on; until then
  /// the statement that writes throws OutputLost.
  void keep_going(const std::string& promise);

  /// Writes what is held back and closes; further text is dropped. Returns the exit code of a
  /// program that would end with `code`: 1 instead of 0 where text was lost, unless its reader
  /// left. Tells of a loss that nothing has told yet. Does not throw.
  int finish(int code) noexcept;

  class Buffer;

 private:
  std::ostream& stream_;
  std::streambuf* before_;
  std::ios_base::iostate exceptions_;
  std::unique_ptr<Buffer> buffer_;
};

}  // namespace tessera
