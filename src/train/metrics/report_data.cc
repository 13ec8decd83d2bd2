#include "train/metrics/report_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "train/metrics/series.h"

namespace tessera {
namespace {

constexpr size_t kPointsPerCurve = 1200;
constexpr size_t kMinStepsToSmooth = 30;
constexpr size_t kMaxLoadNumbers = 60'000;

using Measure = std::function<double(const StepRecord&)>;

struct Curve {
  std::string name;
  std::string style;  // "line", "faint" or "points"
  Series series;
};

struct Chart {
  std::string id;
  std::string title;
  std::string unit;
  std::string
      format;  // how the script writes values: "number", "percent", "count", "rate" or "bytes"
  std::optional<double> reference;
  std::vector<Curve> curves;
};

double value_or_nan(const std::optional<double>& value) {
  return value.value_or(std::numeric_limits<double>::quiet_NaN());
}

Series measure_steps(const RunHistory& history, const Measure& measure) {
  Series series;
  for (const StepRecord& step : history.steps()) {
    series.steps.push_back(step.step);
    series.values.push_back(measure(step));
  }
  return series;
}

bool has_value(const Series& series) {
  return std::any_of(series.values.begin(), series.values.end(),
                     [](double v) { return std::isfinite(v) && v != 0.0; });
}

std::vector<Curve> smoothed_curves(const std::string& name, Series series) {
  if (series.values.size() < kMinStepsToSmooth) return {{name, "line", std::move(series)}};
  const size_t reach = series.values.size() / 100 + 2;
  Series smoothed{series.steps, smooth(series.values, reach)};
  return {{name + ", each step", "faint", std::move(series)}, {name, "line", std::move(smoothed)}};
}

Chart loss_chart(const RunHistory& history) {
  Chart chart{"loss", "Loss", "nats per token", "number", std::nullopt, {}};
  chart.curves = smoothed_curves(
      "training", measure_steps(history, [](const StepRecord& s) { return s.loss; }));
  Curve validation{"validation", "points", {}};
  for (const ValidationRecord& record : history.validations()) {
    validation.series.steps.push_back(record.step);
    validation.series.values.push_back(record.loss);
  }
  if (!validation.series.steps.empty()) chart.curves.push_back(std::move(validation));
  return chart;
}

Chart memory_chart(const RunHistory& history) {
  Chart chart{"memory", "Memory", "highest so far", "bytes", std::nullopt, {}};
  chart.curves.push_back({"used", "line", measure_steps(history, [](const StepRecord& s) {
                            return static_cast<double>(s.memory_used);
                          })});
  Series predicted = measure_steps(
      history, [](const StepRecord& s) { return static_cast<double>(s.memory_predicted); });
  if (has_value(predicted)) chart.curves.push_back({"predicted", "second", std::move(predicted)});
  return chart;
}

/// A chart of one measure: as it is, or with a smoothed curve over faint single steps.
Chart single_chart(Chart chart, const RunHistory& history, const Measure& measure, bool is_noisy) {
  Series series = measure_steps(history, measure);
  if (is_noisy) {
    chart.curves = smoothed_curves(chart.title, std::move(series));
  } else {
    chart.curves.push_back({chart.title, "line", std::move(series)});
  }
  return chart;
}

std::vector<Chart> all_charts(const RunHistory& history) {
  const auto single = [&](Chart chart, const Measure& measure, bool is_noisy) {
    return single_chart(std::move(chart), history, measure, is_noisy);
  };
  return {loss_chart(history),
          single(
              {"mtp", "Multi-token prediction loss", "nats per label", "number", {}, {}},
              [](const auto& s) { return value_or_nan(s.mtp_loss); }, true),
          single(
              {"rate", "Learning rate", "", "rate", {}, {}},
              [](const auto& s) { return s.learning_rate; }, false),
          single(
              {"norm", "Gradient norm", "before clipping", "number", {}, {}},
              [](const auto& s) { return s.grad_norm; }, true),
          single(
              {"logits",
               "Largest attention logit",
               "a bound, exact above optim.qk_clip",
               "number",
               {},
               {}},
              [](const auto& s) { return value_or_nan(s.max_logit); }, true),
          single(
              {"scale", "Loss scale", "gradients overflow where it falls", "count", {}, {}},
              [](const auto& s) { return value_or_nan(s.loss_scale); }, false),
          single(
              {"speed", "Speed", "tokens per second", "count", {}, {}},
              [](const auto& s) { return s.tokens_per_second; }, true),
          single(
              {"peak", "Utilisation", "of the measured matrix peak", "percent", {}, {}},
              [](const auto& s) { return value_or_nan(s.utilisation); }, true),
          single(
              {"balance", "Balance loss", "1.0 is perfect", "number", 1.0, {}},
              [](const auto& s) { return value_or_nan(s.balance_loss); }, true),
          single(
              {"zloss", "Router z-loss", "", "number", {}, {}},
              [](const auto& s) { return value_or_nan(s.z_loss); }, true),
          single(
              {"drops", "Dropped assignments", "per step", "count", {}, {}},
              [](const auto& s) { return static_cast<double>(s.dropped_tokens); }, false),
          single(
              {"saturated", "Saturated values", "largest share of an operand", "number", {}, {}},
              [](const auto& s) { return value_or_nan(s.saturated); }, false),
          memory_chart(history)};
}

/// Charts that every run has; the others appear where the run gave them a value.
bool is_wanted(const Chart& chart) {
  if (chart.id == "loss" || chart.id == "norm" || chart.id == "rate") return true;
  return std::any_of(chart.curves.begin(), chart.curves.end(),
                     [](const Curve& c) { return has_value(c.series); });
}

std::string to_json(const Curve& curve) {
  const Series thin = downsample(curve.series, kPointsPerCurve);
  return fmt::format(R"({{"name":"{}","style":"{}","step":{},"value":{}}})", curve.name,
                     curve.style, json_integers(thin.steps), json_numbers(thin.values));
}

std::string to_json(const Chart& chart) {
  std::vector<std::string> curves;
  for (const Curve& curve : chart.curves) curves.push_back(to_json(curve));
  return fmt::format(
      R"({{"id":"{}","title":"{}","unit":"{}","format":"{}","reference":{},"curves":[{}]}})",
      chart.id, chart.title, chart.unit, chart.format,
      chart.reference ? fmt::format("{}", *chart.reference) : "null", fmt::join(curves, ",\n"));
}

std::string charts_json(const RunHistory& history) {
  std::vector<std::string> charts;
  for (const Chart& chart : all_charts(history)) {
    if (is_wanted(chart)) charts.push_back(to_json(chart));
  }
  return fmt::format("[{}]", fmt::join(charts, ",\n"));
}

/// Tokens and seconds at a thinned-out list of steps, between which the script interpolates.
std::string axes_json(const RunHistory& history) {
  const Series tokens = downsample(
      measure_steps(history,
                    [](const StepRecord& s) { return static_cast<double>(s.tokens_seen); }),
      400);
  const std::vector<double> all_elapsed = history.elapsed_seconds();
  std::vector<double> elapsed;
  size_t position = 0;
  for (const int64_t step : tokens.steps) {
    while (history.steps()[position].step != step) ++position;
    elapsed.push_back(all_elapsed[position]);
  }
  return fmt::format(R"({{"step":{},"tokens":{},"seconds":{}}})", json_integers(tokens.steps),
                     json_numbers(tokens.values), json_numbers(elapsed));
}

size_t num_experts(const LoadWindow& window) {
  size_t count = 0;
  for (const LoadWindow::Layer& layer : window.layers) count += layer.tokens.size();
  return count;
}

/// The windows of the history, joined until all of them together stay within the size of a page.
std::vector<LoadWindow> windows_that_fit(const RunHistory& history) {
  std::vector<LoadWindow> windows = history.windows();
  while (windows.size() > 1 && windows.size() * num_experts(windows.front()) > kMaxLoadNumbers) {
    std::vector<LoadWindow> joined;
    for (size_t i = 0; i < windows.size(); i += 2) {
      joined.push_back(std::move(windows[i]));
      if (i + 1 < windows.size()) joined.back().merge(windows[i + 1]);
    }
    windows = std::move(joined);
  }
  return windows;
}

/// Loads in hundredths of a perfect share, layer by layer. A load above zero is never written as
/// zero.
std::string to_json(const LoadWindow& window) {
  std::vector<std::string> layers;
  for (size_t layer = 0; layer < window.layers.size(); ++layer) {
    std::vector<int64_t> hundredths;
    for (size_t expert = 0; expert < window.layers[layer].tokens.size(); ++expert) {
      hundredths.push_back(
          static_cast<int64_t>(std::ceil(100.0 * window.relative_load(layer, expert) - 0.5)));
      if (window.layers[layer].tokens[expert] > 0.0)
        hundredths.back() = std::max<int64_t>(hundredths.back(), 1);
    }
    layers.push_back(json_integers(hundredths));
  }
  return fmt::format(R"({{"first":{},"last":{},"load":[{}]}})", window.first_step, window.last_step,
                     fmt::join(layers, ","));
}

std::string experts_json(const RunHistory& history) {
  if (history.windows().empty()) return "null";
  std::vector<LoadWindow> windows = windows_that_fit(history);
  // The last picture is the one that the findings speak of.
  windows.back() = *history.recent_load();
  std::vector<int64_t> layers;
  for (const LoadWindow::Layer& layer : windows.front().layers) layers.push_back(layer.layer);
  std::vector<std::string> loads;
  for (const LoadWindow& window : windows) loads.push_back(to_json(window));
  return fmt::format(R"({{"layers":{},"windows":[{}]}})", json_integers(layers),
                     fmt::join(loads, ",\n"));
}

}  // namespace

std::string report_data_json(const RunHistory& history) {
  return fmt::format("{{\"axes\":{},\n\"charts\":{},\n\"experts\":{}}}", axes_json(history),
                     charts_json(history), experts_json(history));
}

}  // namespace tessera
