#include "sim/kernel_times.h"

#include <algorithm>
#include <cmath>

#include "sim/units.h"

namespace tessera {
namespace {

/// So that nothing has the logarithm of zero.
constexpr double kLeast = 1;
/// Points between which is interpolated.
constexpr size_t kNeighbours = 4;

std::string key_of(std::string_view name, std::string_view format) {
  return fmt::format("{} {}", name, format);
}

double log_of(double value) {
  return std::log(std::max(value, kLeast));
}

}  // namespace

KernelTimes::KernelTimes(const Hardware& hardware, Shares shares)
    : hardware_(hardware), shares_(std::move(shares)) {
  const Hardware measured = hardware.like.empty() ? hardware : load_hardware(hardware.like);
  for (const KernelSample& sample : measured.samples()) {
    const Cost cost{.flops = sample.flops, .bytes = sample.bytes};
    const std::string key = key_of(sample.name, sample.format);
    points_[key].push_back(
        {.work = log_of(cost.flops),
         .bytes = log_of(cost.bytes),
         .share = std::log(roofline(measured, sample.format, cost) / sample.seconds)});
    const auto [least, is_new] = least_.try_emplace(key, sample.seconds);
    if (!is_new) least->second = std::min(least->second, sample.seconds);
  }
}

double KernelTimes::roofline(const Hardware& hardware, std::string_view format, const Cost& cost) {
  const double least = std::max(
      {cost.flops / hardware.matrix_rate(format), cost.bytes / hardware.memory_rate(), 1e-12});
  return least;
}

double KernelTimes::find_share(const std::vector<Point>& points, const Point& at) const {
  struct Near {
    double distance = 0;
    double share = 0;
  };
  std::vector<Near> near;
  for (const Point& point : points)
    near.push_back({std::hypot(point.work - at.work, point.bytes - at.bytes), point.share});
  const size_t count = std::min(kNeighbours, near.size());
  std::partial_sort(near.begin(), near.begin() + static_cast<ptrdiff_t>(count), near.end(),
                    [](const Near& a, const Near& b) { return a.distance < b.distance; });
  constexpr double kSame = 1e-3;  // samples are rounded to four digits
  if (near.front().distance < kSame) return near.front().share;
  double weights = 0;
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const double weight = 1 / (near[i].distance * near[i].distance);
    weights += weight;
    sum += weight * near[i].share;
  }
  return sum / weights;
}

double KernelTimes::seconds(std::string_view name, std::string_view format,
                            const Cost& cost) const {
  const double least = roofline(format, cost);
  if (const auto share = shares_.find(name); share != shares_.end())
    return share->second > 0 ? least / share->second : 0;
  auto points = points_.find(key_of(name, format));
  // Where products that are one kernel, or attention around a ring, were not measured, they take
  // what the plain operator does of their size.
  for (const std::string_view prefix : {"joined_", "ring_"}) {
    if (points == points_.end() && name.starts_with(prefix))
      points = points_.find(key_of(name.substr(prefix.size()), format));
  }
  if (points == points_.end()) {
    const bool computes =
        cost.flops / hardware_.matrix_rate(format) > cost.bytes / hardware_.memory_rate();
    return least / (computes ? hardware_.product_share : hardware_.memory_share);
  }
  const double share = find_share(points->second, {log_of(cost.flops), log_of(cost.bytes)});
  // What is smaller than anything measured starts and ends as the smallest does.
  return std::max(least / std::exp(share), std::min(least_.find(points->first)->second, 2e-6));
}

}  // namespace tessera
