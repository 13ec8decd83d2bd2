#include "ops/cache_append/cache_append.h"

namespace tessera {

CacheAppend::CacheAppend(int64_t capacity) : capacity_(capacity) {
  require(capacity >= 0, "cache_append: capacity = {} must not be negative", capacity);
}

std::string CacheAppend::attributes() const {
  return fmt::format("capacity={}", capacity_);
}

std::vector<ValueType> CacheAppend::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes rows and start, found {} inputs", inputs.size());
  const ValueType& rows = inputs[kRows];
  const ValueType& start = inputs[kStart];
  check_shape(*this, is_storage(rows.dtype), "rows must be f32 or bf16, found {}",
              rows.to_string());
  check_shape(*this, rows.shape.rank() == 2, "rows are {}, expected [T, C]", rows.to_string());
  check_shape(*this, start.dtype == DType::kI32 && start.shape.num_elements() == 1,
              "start is {}, expected i32 [1]", start.to_string());
  return {{rows.dtype, {capacity_, rows.shape[1]}}};
}

Cost CacheAppend::cost(std::span<const ValueType> inputs,
                       std::span<const ValueType> /*outputs*/) const {
  return {.bytes = 2.0 * static_cast<double>(inputs[kRows].num_bytes())};
}

OperatorPtr make_cache_append(int64_t capacity) {
  return std::make_shared<CacheAppend>(capacity);
}

}  // namespace tessera
