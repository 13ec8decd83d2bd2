#pragma once

#include <type_traits>
#include <vector>

#include "comm/communicator.h"

namespace tessera {

/// Each member's value, as bytes, in the order of the group. All members call.
template <typename T>
std::vector<T> gather_value(Communicator& group, T own) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<size_t>(group.size()));
  const auto bytes = static_cast<int64_t>(sizeof(T));
  group.all_gather({&own, DType::kU8, {1, bytes}}, {all.data(), DType::kU8, {group.size(), bytes}})
      .wait();
  return all;
}

}  // namespace tessera
