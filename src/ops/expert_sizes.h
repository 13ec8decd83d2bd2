#pragma once

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"

namespace tessera {

/// A size of every expert of one layer; experts may differ.
class ExpertSizes {
 public:
  /// Throws UserError naming `what` where there is no expert or a size is below 1.
  ExpertSizes(std::vector<int64_t> sizes, std::string_view what) : sizes_(std::move(sizes)) {
    require(!sizes_.empty(), "{}: a layer needs at least one expert", what);
    for (const int64_t size : sizes_) {
      require(size >= 1, "{}: an expert has size {}, expected at least 1", what, size);
    }
  }

  int64_t num_experts() const { return std::ssize(sizes_); }
  int64_t operator[](int64_t expert) const { return sizes_[expert]; }
  int64_t largest() const { return *std::ranges::max_element(sizes_); }
  int64_t total() const { return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0}); }
  bool are_equal() const { return std::ranges::count(sizes_, sizes_[0]) == num_experts(); }
  const std::vector<int64_t>& values() const { return sizes_; }
  /// "8x1024" where all are equal, else "[512, 1024]".
  std::string to_string() const {
    return are_equal() ? fmt::format("{}x{}", num_experts(), sizes_[0]) : fmt::format("{}", sizes_);
  }

 private:
  std::vector<int64_t> sizes_;
};

}  // namespace tessera
