#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// Values over steps, to be drawn as a line. A value that is not finite is a gap.
struct Series {
  std::vector<int64_t> steps;
  std::vector<double> values;
};

/// At most `max_points` (at least 8) of the points: the ends, and the least, the greatest and the
/// first non-finite value of each of equally long stretches, so that no spike and no gap is lost.
/// Fewer points are kept as they are.
Series downsample(const Series& series, size_t max_points);

/// The mean of each value and up to `reach` neighbours on either side. Near an end one side may
/// have at most reach / 4 more than the other, so that a slope is hardly shifted. Values that are
/// not finite stay as they are and do not count.
std::vector<double> smooth(std::span<const double> values, size_t reach);

/// "[1,null,0.333333]": six significant digits.
std::string json_numbers(std::span<const double> values);
std::string json_integers(std::span<const int64_t> values);

}  // namespace tessera
