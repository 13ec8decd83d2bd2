#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>

namespace tessera {

/// What may be written to a stream. The defaults suit a file or a pipe: plain text, no redrawing.
struct Terminal {
  bool interactive = false;  ///< a line can be redrawn in place
  bool colour = false;
  bool unicode = false;
  std::function<int()> width = [] { return 80; };  ///< columns, asked anew at each drawing
  std::function<double()> now;                     ///< monotonic seconds; null means the real clock
};

/// Describes the terminal behind a file descriptor: isatty and TERM decide whether lines can be
/// redrawn, NO_COLOR switches colours off, the locale decides on Unicode, the window's size or
/// COLUMNS gives the width.
Terminal detect_terminal(int file_descriptor);

/// "42", "12.3k", "1.24M": three significant digits and a decimal prefix.
std::string format_count(double count);
/// "1 layer", "2 layers": for nouns that take an s.
std::string format_things(int64_t count, std::string_view thing);
/// "0.85s", "42s", "1m 42s", "2h 05m", "3d 04h"; "-" for a value that is not finite or below zero.
std::string format_duration(double seconds);

/// Wraps text in an ANSI colour ("31" is red) where `on`; returns it unchanged otherwise.
std::string coloured(std::string_view text, std::string_view code, bool on);

/// One progress line that fits in `width` columns: label, bar, percentage, detail. The bar shrinks
/// and then vanishes before the detail is cut.
std::string format_progress(std::string_view label, double fraction, std::string_view detail,
                            int width, const Terminal& terminal);

/// A progress line at the foot of a terminal, redrawn in place at most ten times a second, each
/// time with a single write. On anything but an interactive terminal it draws nothing, and only
/// print() writes.
class ProgressBar {
 public:
  ProgressBar(std::ostream& out, Terminal terminal, std::string label);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();

  /// Sets the state and redraws unless the last drawing was less than a tenth of a second ago.
  void update(double fraction, std::string_view detail);
  /// Writes a line that stays, above the bar.
  void print(std::string_view line);
  /// Removes the bar; a later update draws it again.
  void clear();
  const Terminal& terminal() const { return terminal_; }

 private:
  std::string drawing() const;

  std::ostream& out_;
  Terminal terminal_;
  std::string label_;
  std::string detail_;
  double fraction_ = 0.0;
  double last_drawn_ = 0.0;
  bool shown_ = false;
};

}  // namespace tessera
