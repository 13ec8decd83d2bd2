#include "core/nonfinite.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace tessera {
namespace {

/// An exponent of all ones: NaN or infinite.
template <typename Bits, Bits kExponent>
int64_t count_exponents(std::span<const std::byte> elements) {
  const auto count = std::ssize(elements) / int64_t{sizeof(Bits)};
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, elements.data() + i * int64_t{sizeof(Bits)}, sizeof(Bits));
    found += (bits & kExponent) == kExponent ? 1 : 0;
  }
  return found;
}

}  // namespace

int64_t count_nonfinite(std::span<const std::byte> elements, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return count_exponents<uint32_t, 0x7F800000U>(elements);
    case DType::kBF16:
      return count_exponents<uint16_t, 0x7F80U>(elements);
    case DType::kF16:
      return count_exponents<uint16_t, 0x7C00U>(elements);
    case DType::kF64:
      return count_exponents<uint64_t, 0x7FF0000000000000ULL>(elements);
    default:
      return 0;
  }
}

void NonFiniteTensors::add(std::string_view name, int64_t num_elements) {
  if (num_elements == 0) return;
  const auto known = std::ranges::find(tensors_, name, &std::pair<std::string, int64_t>::first);
  if (known != tensors_.end()) {
    known->second += num_elements;
  } else {
    tensors_.emplace_back(name, num_elements);
  }
}

int64_t NonFiniteTensors::num_elements() const {
  int64_t total = 0;
  for (const auto& [name, count] : tensors_) total += count;
  return total;
}

std::string NonFiniteTensors::describe() const {
  const auto& [name, count] = tensors_.front();
  std::string text = fmt::format("the tensor '{}' has {} element{} that {} NaN or infinite", name,
                                 count, count == 1 ? "" : "s", count == 1 ? "is" : "are");
  if (num_tensors() > 1) {
    text += fmt::format(", and so have {} other{} ({} elements in all)", num_tensors() - 1,
                        num_tensors() == 2 ? "" : "s", num_elements());
  }
  return text;
}

}  // namespace tessera
