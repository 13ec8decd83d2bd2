#include "train/metrics/console.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/memory.h"

namespace tessera {
namespace {

constexpr std::string_view kGap = "  ";
constexpr std::string_view kRed = "31";
constexpr std::string_view kGreen = "32";
constexpr std::string_view kBold = "1";

/// Four significant digits without an exponent where that stays short.
std::string four_digits(double value) {
  const double size = std::abs(value);
  if (!std::isfinite(value) || size == 0.0) return fmt::format("{}", value);
  if (size < 1e-3 || size >= 1e5) return fmt::format("{:.2e}", value);
  const int decimals = std::clamp(3 - static_cast<int>(std::floor(std::log10(size))), 0, 4);
  return fmt::format("{:.{}f}", value, decimals);
}

std::string step_cell(const StepRecord& r) {
  return fmt::format("{}/{}", r.step, r.total_steps);
}
std::string loss_cell(const StepRecord& r) {
  return fmt::format("{:.4f}", r.loss);
}
std::string mtp_cell(const StepRecord& r) {
  return r.mtp_loss ? fmt::format("{:.4f}", *r.mtp_loss) : "-";
}
std::string balance_cell(const StepRecord& r) {
  return r.balance_loss ? fmt::format("{:.3f}", *r.balance_loss) : "-";
}
std::string grad_norm_cell(const StepRecord& r) {
  return four_digits(r.grad_norm);
}
std::string scale_cell(const StepRecord& r) {
  return fmt::format("{:.0f}", r.loss_scale.value_or(1));
}
std::string rate_cell(const StepRecord& r) {
  return fmt::format("{:.2e}", r.learning_rate);
}
std::string speed_cell(const StepRecord& r) {
  return format_count(r.tokens_per_second);
}
std::string tflops_cell(const StepRecord& r) {
  return four_digits(r.tflops());
}
std::string utilisation_cell(const StepRecord& r) {
  return r.utilisation ? fmt::format("{:.1f}%", *r.utilisation * 100.0) : "-";
}
std::string memory_cell(const StepRecord& r) {
  if (r.memory_predicted <= 0) return format_bytes(r.memory_used);
  return fmt::format("{} of {}", format_bytes(r.memory_used), format_bytes(r.memory_predicted));
}
std::string eta_cell(const StepRecord& r) {
  return format_duration(r.eta_seconds);
}

std::vector<ConsoleColumn> all_columns(const StepRecord& first) {
  const int step_width = static_cast<int>(2 * fmt::formatted_size("{}", first.total_steps) + 1);
  std::vector<ConsoleColumn> columns = {{"step", std::max(step_width, 7), step_cell},
                                        {"loss", 8, loss_cell},
                                        {"mtp loss", 8, mtp_cell},
                                        {"balance", 7, balance_cell},
                                        {"grad norm", 9, grad_norm_cell},
                                        {"loss scale", 10, scale_cell},
                                        {"lr", 8, rate_cell},
                                        {"tokens/s", 8, speed_cell},
                                        {"TFLOPS", 7, tflops_cell},
                                        {"of peak", 7, utilisation_cell},
                                        {"memory of predicted", 22, memory_cell},
                                        {"ETA", 7, eta_cell}};
  const auto drop = [&](std::string_view title) {
    std::erase_if(columns, [&](const ConsoleColumn& column) { return column.title == title; });
  };
  if (!first.mtp_loss) drop("mtp loss");
  if (!first.balance_loss) drop("balance");
  if (!first.loss_scale) drop("loss scale");
  if (!first.utilisation) drop("of peak");
  if (first.model_flops <= 0.0) drop("TFLOPS");
  return columns;
}

int line_width(const std::vector<ConsoleColumn>& columns) {
  int width = 0;
  for (const ConsoleColumn& column : columns) width += column.width + static_cast<int>(kGap.size());
  return width - static_cast<int>(kGap.size());
}

std::string troubles(const StepRecord& record) {
  std::string text;
  if (record.dropped_tokens > 0) text += fmt::format("{}{} dropped", kGap, record.dropped_tokens);
  if (const int64_t heads = record.clipped_heads.value_or(0); heads > 0)
    text += fmt::format("{}{} head{} clipped", kGap, heads, heads == 1 ? "" : "s");
  if (record.skipped_steps > 0)
    text += fmt::format("{}{} skipped so far", kGap, record.skipped_steps);
  if (const int64_t repeated = record.repeated_steps.value_or(0); repeated > 0)
    text += fmt::format("{}{} repeated so far", kGap, repeated);
  if (record.overflowed()) {
    text += fmt::format("{}gradients overflowed", kGap);
  } else if (!record.is_finite()) {
    text += fmt::format("{}not finite", kGap);
  }
  return text;
}

}  // namespace

std::vector<ConsoleColumn> choose_columns(const StepRecord& first, int width) {
  constexpr std::array<std::string_view, 7> kLeastImportantFirst = {
      "TFLOPS", "memory of predicted", "lr", "loss scale", "grad norm", "of peak", "balance"};
  std::vector<ConsoleColumn> columns = all_columns(first);
  for (const std::string_view title : kLeastImportantFirst) {
    if (line_width(columns) < width) break;
    std::erase_if(columns, [&](const ConsoleColumn& column) { return column.title == title; });
  }
  return columns;
}

std::string format_header(const std::vector<ConsoleColumn>& columns) {
  std::string line;
  for (const ConsoleColumn& column : columns) {
    line += fmt::format("{}{:>{}}", line.empty() ? "" : kGap, column.title, column.width);
  }
  return line;
}

std::string format_step(const std::vector<ConsoleColumn>& columns, const StepRecord& record) {
  std::string line;
  for (const ConsoleColumn& column : columns) {
    line += fmt::format("{}{:>{}}", line.empty() ? "" : kGap, column.cell(record), column.width);
  }
  return line + troubles(record);
}

std::string format_validation(const ValidationRecord& record, bool is_best) {
  std::string line = fmt::format("validation at step {}: loss {:.4f} (perplexity {})", record.step,
                                 record.loss, four_digits(std::exp(record.loss)));
  if (is_best) line += ", best so far";
  if (record.seconds > 0.0) line += ", " + format_duration(record.seconds);
  return line;
}

std::string format_live(const StepRecord& record) {
  return fmt::format("{}/{}  loss {:.4f}  {} tokens/s  ETA {}", record.step, record.total_steps,
                     record.loss, format_count(record.tokens_per_second),
                     format_duration(record.eta_seconds));
}

Console::Console(std::ostream& out, const ConsoleOptions& options)
    : bar_(out, options.terminal, "train"), every_(std::max<int64_t>(options.every, 1)) {}

void Console::step(const StepRecord& record) {
  const Terminal& terminal = bar_.terminal();
  const double total = static_cast<double>(std::max<int64_t>(record.total_steps, 1));
  bar_.update(static_cast<double>(record.step) / total, format_live(record));
  if (columns_.empty()) {
    const int width = terminal.interactive ? terminal.width() : std::numeric_limits<int>::max();
    columns_ = choose_columns(record, width);
    bar_.print(coloured(format_header(columns_), kBold, terminal.colour));
  }
  if (wants_line(record)) {
    bar_.print(coloured(format_step(columns_, record), kRed,
                        terminal.colour && !record.is_finite() && !record.overflowed()));
  }
  skipped_steps_ = record.skipped_steps;
  repeated_steps_ = record.repeated_steps.value_or(0);
}

void Console::validation(const ValidationRecord& record, bool is_best) {
  bar_.print(
      coloured(format_validation(record, is_best), kGreen, bar_.terminal().colour && is_best));
}

bool Console::wants_line(const StepRecord& record) const {
  const bool trouble = !record.is_finite() || record.skipped_steps > skipped_steps_ ||
                       record.repeated_steps.value_or(0) > repeated_steps_;
  return trouble || record.step % every_ == 0 || record.step == 1 ||
         record.step == record.total_steps;
}

}  // namespace tessera
