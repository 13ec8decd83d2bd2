#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dtype.h"

namespace tessera {

/// How many elements are NaN or infinite. Types other than F32, BF16, F16 and F64 have none. The
/// bytes need not be aligned.
int64_t count_nonfinite(std::span<const std::byte> elements, DType dtype);

/// The tensors that have elements that are NaN or infinite, in the order in which they were read.
class NonFiniteTensors {
 public:
  /// Counts elements of a part of a tensor.
  void add(std::string_view name, int64_t num_elements);

  bool empty() const { return tensors_.empty(); }
  int64_t num_tensors() const { return std::ssize(tensors_); }
  int64_t num_elements() const;
  /// "weight 'layers.0.attn.q.weight' has 3 elements that are NaN or infinite, and so have 2 others
  /// (40 elements in all)". REQUIRES !empty().
  std::string describe() const;

 private:
  std::vector<std::pair<std::string, int64_t>> tensors_;  // by the first time that each was added
};

}  // namespace tessera
