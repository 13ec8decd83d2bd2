#pragma once

#include <map>
#include <string>
#include <vector>

#include "ops/operator.h"
#include "sim/hardware.h"

namespace tessera {

/// How long operators take on some hardware: of each the share that it reaches of what the rates
/// allow (the roofline), by interpolation between measured calls of the same operator and format
/// that do about as much work with about as many bytes. Shares measured on one machine hold for
/// another whose file says so (kernels.like).
class KernelTimes {
 public:
  /// `shares` by operator's name: of the rates, in place of what was measured; 0 of what takes no
  /// time.
  using Shares = std::map<std::string, double, std::less<>>;
  explicit KernelTimes(const Hardware& hardware, Shares shares = {});

  /// Seconds of an operator's run beside the gap to the next.
  double seconds(std::string_view name, std::string_view format, const Cost& cost) const;
  /// The least that the rates allow.
  double roofline(std::string_view format, const Cost& cost) const {
    return roofline(hardware_, format, cost);
  }

 private:
  /// A measured call: the logarithms of its work and bytes, and of the share.
  struct Point {
    double work = 0;
    double bytes = 0;
    double share = 0;
  };
  static double roofline(const Hardware& hardware, std::string_view format, const Cost& cost);
  double find_share(const std::vector<Point>& points, const Point& at) const;

  Hardware hardware_;
  Shares shares_;
  std::map<std::string, std::vector<Point>, std::less<>> points_;  // by "name format"
  std::map<std::string, double, std::less<>> least_;  // the shortest measured call, likewise
};

}  // namespace tessera
