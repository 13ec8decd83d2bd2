#include "train/metrics/series.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "core/error.h"

namespace tessera {
namespace {

/// Adds the positions in [begin, end) that a reader of the curve must see.
void pick_extremes(const std::vector<double>& values, size_t begin, size_t end,
                   std::vector<size_t>& picked) {
  const size_t none = values.size();
  size_t least = none;
  size_t greatest = none;
  size_t gap = none;
  for (size_t i = begin; i < end; ++i) {
    if (!std::isfinite(values[i])) {
      gap = std::min(gap, i);
    } else {
      if (least == none || values[i] < values[least]) least = i;
      if (greatest == none || values[i] > values[greatest]) greatest = i;
    }
  }
  for (const size_t position : {least, greatest, gap}) {
    if (position != none) picked.push_back(position);
  }
}

}  // namespace

Series downsample(const Series& series, size_t max_points) {
  ensure(max_points >= 8 && series.steps.size() == series.values.size(),
         "downsample: {} steps, {} values, {} points", series.steps.size(), series.values.size(),
         max_points);
  const size_t count = series.values.size();
  if (count <= max_points) return series;
  const size_t num_stretches = (max_points - 2) / 3;
  std::vector<size_t> picked = {0, count - 1};
  for (size_t i = 0; i < num_stretches; ++i) {
    pick_extremes(series.values, i * count / num_stretches, (i + 1) * count / num_stretches,
                  picked);
  }
  std::sort(picked.begin(), picked.end());
  picked.erase(std::unique(picked.begin(), picked.end()), picked.end());
  Series result;
  for (const size_t position : picked) {
    result.steps.push_back(series.steps[position]);
    result.values.push_back(series.values[position]);
  }
  return result;
}

std::vector<double> smooth(std::span<const double> values, size_t reach) {
  const size_t count = values.size();
  std::vector<double> sums(count + 1, 0.0);
  std::vector<double> counts(count + 1, 0.0);
  for (size_t i = 0; i < count; ++i) {
    const bool finite = std::isfinite(values[i]);
    sums[i + 1] = sums[i] + (finite ? values[i] : 0.0);
    counts[i + 1] = counts[i] + (finite ? 1.0 : 0.0);
  }
  std::vector<double> result(values.begin(), values.end());
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) continue;
    const size_t before = std::min({reach, i, count - 1 - i + reach / 4});
    const size_t after = std::min({reach, count - 1 - i, i + reach / 4});
    result[i] =
        (sums[i + after + 1] - sums[i - before]) / (counts[i + after + 1] - counts[i - before]);
  }
  return result;
}

std::string json_numbers(std::span<const double> values) {
  std::string text = "[";
  for (const double value : values) {
    if (text.size() > 1) text += ',';
    if (std::isfinite(value)) {
      fmt::format_to(std::back_inserter(text), "{:.6g}", value);
    } else {
      text += "null";
    }
  }
  return text + ']';
}

std::string json_integers(std::span<const int64_t> values) {
  return fmt::format("[{}]", fmt::join(values.begin(), values.end(), ","));
}

}  // namespace tessera
