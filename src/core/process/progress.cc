#include "core/process/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <utility>

namespace tessera {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr int kMinBarWidth = 10;
constexpr int kMaxBarWidth = 40;

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

int terminal_width(int file_descriptor) {
  winsize size{};
  if (ioctl(file_descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const int columns = std::atoi(std::string(environment("COLUMNS")).c_str());
  return columns > 0 ? columns : 80;
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string_view value = environment(name);
    if (value.empty()) continue;
    return value.find("UTF-8") != value.npos || value.find("utf8") != value.npos;
  }
  return false;
}

bool starts_code_point(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0U) != 0x80U;
}

int num_columns(std::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), starts_code_point));
}

std::string cut_to_columns(std::string_view text, int columns) {
  size_t end = 0;
  for (int used = 0; end < text.size(); ++end) {
    if (starts_code_point(text[end]) && ++used > columns) break;
  }
  return std::string(text.substr(0, end));
}

std::string repeated(std::string_view piece, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += piece;
  return text;
}

std::string draw_bar(double fraction, int width, const Terminal& terminal) {
  const int done = static_cast<int>(std::lround(fraction * width));
  if (!terminal.unicode) return '[' + repeated("=", done) + repeated(" ", width - done) + ']';
  return coloured(repeated("━", done), "36", terminal.colour) +
         coloured(repeated("─", width - done), "90", terminal.colour);
}

double valid_fraction(double fraction) {
  return std::isfinite(fraction) ? std::clamp(fraction, 0.0, 1.0) : 0.0;
}

}  // namespace

Terminal detect_terminal(int file_descriptor) {
  Terminal terminal;
  terminal.interactive = isatty(file_descriptor) == 1 && environment("TERM") != "dumb";
  terminal.colour = terminal.interactive && environment("NO_COLOR").empty();
  terminal.unicode = terminal.interactive && locale_is_utf8();
  terminal.width = [file_descriptor] { return terminal_width(file_descriptor); };
  return terminal;
}

std::string format_things(int64_t count, std::string_view thing) {
  return fmt::format("{} {}{}", count, thing, count == 1 ? "" : "s");
}

std::string format_count(double count) {
  constexpr std::array kPrefixes = {"", "k", "M", "G", "T", "P", "E"};
  if (!std::isfinite(count)) return fmt::format("{}", count);
  size_t prefix = 0;
  while (std::abs(count) >= 999.5 && prefix + 1 < kPrefixes.size()) {
    count /= 1000.0;
    ++prefix;
  }
  if (prefix == 0) return fmt::format("{:.0f}", count);
  const int decimals = std::abs(count) < 9.995 ? 2 : std::abs(count) < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f}{}", count, decimals, kPrefixes[prefix]);
}

std::string format_duration(double seconds) {
  constexpr double kLongest = 1e12;
  if (!std::isfinite(seconds) || seconds < 0.0 || seconds > kLongest) return "-";
  if (seconds == 0.0) return "0s";
  if (seconds < 9.995) return fmt::format("{:.2f}s", seconds);
  const int64_t total = std::llround(seconds);
  const int64_t minutes = total / 60;
  const int64_t hours = minutes / 60;
  if (minutes == 0) return fmt::format("{}s", total);
  if (hours == 0) return fmt::format("{}m {:02}s", minutes, total % 60);
  if (hours < 24) return fmt::format("{}h {:02}m", hours, minutes % 60);
  return fmt::format("{}d {:02}h", hours / 24, hours % 24);
}

std::string coloured(std::string_view text, std::string_view code, bool on) {
  return on ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : std::string(text);
}

std::string format_progress(std::string_view label, double fraction, std::string_view detail,
                            int width, const Terminal& terminal) {
  fraction = valid_fraction(fraction);
  const std::string percent = fmt::format("{:3.0f}%", std::floor(fraction * 100.0));
  const int frame = terminal.unicode ? 0 : 2;
  const std::string rest = fmt::format("{}  {}", percent, detail);
  // The last column stays free: writing it makes some terminals wrap.
  const int space = width - 1 - num_columns(label) - num_columns(rest) - 4 - frame;
  if (space < kMinBarWidth)
    return cut_to_columns(fmt::format("{}  {}", label, rest), std::max(width - 1, 0));
  return fmt::format("{}  {}  {}", label,
                     draw_bar(fraction, std::min(space, kMaxBarWidth), terminal), rest);
}

ProgressBar::ProgressBar(std::ostream& out, Terminal terminal, std::string label)
    : out_(out), terminal_(std::move(terminal)), label_(std::move(label)) {
  if (!terminal_.now) terminal_.now = steady_seconds;
}

ProgressBar::~ProgressBar() {
  try {
    clear();
  } catch (...) {
    shown_ = false;  // the stream has told of its error where it can be heard
  }
}

void ProgressBar::update(double fraction, std::string_view detail) {
  if (!terminal_.interactive) return;
  fraction_ = fraction;
  detail_ = detail;
  const double now = terminal_.now();
  if (shown_ && now - last_drawn_ < kRedrawSeconds) return;
  last_drawn_ = now;
  shown_ = true;
  out_ << drawing() << std::flush;
}

void ProgressBar::print(std::string_view line) {
  if (!shown_) {
    out_ << fmt::format("{}\n", line) << std::flush;
    return;
  }
  out_ << fmt::format("\r{}\x1b[K\n{}", line, drawing()) << std::flush;
}

void ProgressBar::clear() {
  if (!shown_) return;
  shown_ = false;
  out_ << "\r\x1b[K" << std::flush;
}

std::string ProgressBar::drawing() const {
  return fmt::format("\r{}\x1b[K",
                     format_progress(label_, fraction_, detail_, terminal_.width(), terminal_));
}

}  // namespace tessera
