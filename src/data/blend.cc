#include "data/blend.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <queue>
#include <utility>

#include "core/error.h"

namespace tessera {
namespace {

/// The weights times `factor` where all of them are then integers, except for rounding.
std::optional<std::vector<int64_t>> scale_exactly(const std::vector<double>& weights,
                                                  double factor) {
  constexpr double kLargest = 1e15;
  std::vector<int64_t> scaled;
  for (const double weight : weights) {
    const double product = weight * factor;
    if (product > kLargest || std::abs(product - std::round(product)) > 1e-12 * product) {
      return std::nullopt;
    }
    scaled.push_back(std::llround(product));
  }
  return scaled;
}

/// Parts of `sum` in about the ratio of the weights; what rounding leaves goes to the largest.
std::vector<int64_t> round_to_sum(const std::vector<double>& weights, int64_t sum) {
  constexpr double kUnit = 1.0 / 65536;  // finite weights may have an infinite sum
  double total = 0;
  for (const double weight : weights) total += weight * kUnit;
  std::vector<int64_t> parts;
  for (const double weight : weights) {
    const auto part = std::llround(weight * kUnit / total * static_cast<double>(sum));
    parts.push_back(weight > 0 ? std::max<int64_t>(part, 1) : 0);
  }
  *std::ranges::max_element(parts) += sum - std::accumulate(parts.begin(), parts.end(), int64_t{0});
  return parts;
}

/// The next draw of a dataset, and when it is due: a sample number and the dataset.
using Due = std::pair<int64_t, int64_t>;
using DueQueue = std::priority_queue<Due, std::vector<Due>, std::greater<>>;

}  // namespace

std::vector<int64_t> integer_weights(const std::vector<double>& weights, int64_t max_sum) {
  constexpr int kMostDecimals = 9;
  for (int decimals = 0; decimals <= kMostDecimals; ++decimals) {
    auto scaled = scale_exactly(weights, std::pow(10, decimals));
    if (!scaled) continue;
    int64_t divisor = 0;
    int64_t sum = 0;
    for (const int64_t weight : *scaled) {
      divisor = std::gcd(divisor, weight);
      sum += weight;
    }
    if (sum / divisor > max_sum) break;
    for (int64_t& weight : *scaled) weight /= divisor;
    return *scaled;
  }
  return round_to_sum(weights, max_sum);
}

DrawOrder::DrawOrder(const std::vector<double>& weights) : places_(weights.size()) {
  ensure(std::ranges::any_of(weights, [](double weight) { return weight > 0; }),
         "no dataset has a weight");
  ensure(weights.size() <= std::numeric_limits<uint16_t>::max(), "{} datasets", weights.size());
  const std::vector<int64_t> parts = integer_weights(weights, kMaxPeriod);
  const int64_t period = std::accumulate(parts.begin(), parts.end(), int64_t{0});
  order_.reserve(period);
  DueQueue waiting;  // by the sample from which on they may be drawn
  DueQueue open;     // by the sample before which they must be
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] > 0) waiting.emplace(0, static_cast<int64_t>(i));
  }
  for (int64_t sample = 0; sample < period; ++sample) {
    for (; !waiting.empty() && waiting.top().first <= sample; waiting.pop()) {
      const int64_t dataset = waiting.top().second;
      const int64_t part = parts[dataset];
      const auto drawn = static_cast<int64_t>(places_[dataset].size());
      open.emplace(((drawn + 1) * period + part - 1) / part, dataset);
    }
    ensure(!open.empty() && open.top().first > sample, "no dataset is due at sample {}", sample);
    const int64_t dataset = open.top().second;
    open.pop();
    auto& places = places_[dataset];
    order_.push_back(static_cast<uint16_t>(dataset));
    places.push_back(static_cast<uint32_t>(sample));
    const int64_t part = parts[dataset];
    waiting.emplace(static_cast<int64_t>(places.size()) * period / part, dataset);
  }
}

Draw DrawOrder::at(int64_t sample) const {
  const int64_t dataset = order_[sample % period()];
  return {dataset, count(dataset, sample)};
}

int64_t DrawOrder::count(int64_t dataset, int64_t num_samples) const {
  const auto& places = places_[dataset];
  const auto before = std::ranges::lower_bound(places, num_samples % period()) - places.begin();
  return num_samples / period() * static_cast<int64_t>(places.size()) + before;
}

Blend::Blend(const std::vector<BlendPhase>& phases) {
  ensure(!phases.empty() && phases.front().first_sample == 0, "a blend begins at sample 0");
  num_datasets_ = static_cast<int64_t>(phases.front().weights.size());
  std::vector<int64_t> drawn(num_datasets_, 0);
  for (const BlendPhase& phase : phases) {
    ensure(std::cmp_equal(phase.weights.size(), num_datasets_), "a weight for each dataset");
    if (!phases_.empty()) {
      const int64_t length = phase.first_sample - phases_.back().first_sample;
      ensure(length > 0, "phases of a blend out of order");
      for (int64_t i = 0; i < num_datasets_; ++i) {
        drawn[i] += phases_.back().order.count(i, length);
      }
    }
    phases_.push_back({phase.first_sample, DrawOrder(phase.weights), drawn});
  }
}

const Blend::Phase& Blend::phase_of(int64_t sample) const {
  const auto after = std::ranges::upper_bound(phases_, sample, {}, &Phase::first_sample);
  return *std::prev(after);
}

Draw Blend::at(int64_t sample) const {
  const Phase& phase = phase_of(sample);
  Draw draw = phase.order.at(sample - phase.first_sample);
  draw.index += phase.drawn_before[draw.dataset];
  return draw;
}

int64_t Blend::count(int64_t dataset, int64_t num_samples) const {
  const Phase& phase = phase_of(num_samples);
  return phase.drawn_before[dataset] + phase.order.count(dataset, num_samples - phase.first_sample);
}

}  // namespace tessera
