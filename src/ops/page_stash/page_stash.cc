#include "ops/page_stash/page_stash.h"

#include <algorithm>

namespace tessera {
namespace {

std::vector<ValueType> pool_types(int64_t page_bytes) {
  return {{DType::kU8, {page_bytes}}, {DType::kI32, {1}}, {DType::kI64, {kPoolStates}}};
}

ValueType table_type(const ValueType& value, int64_t page_bytes) {
  return {DType::kI32, {most_pages(value, page_bytes)}};
}

void check_value(const Operator& op, const ValueType& value) {
  check_shape(op, value.ragged_dim == 0 && value.scale == ScaleLayout(),
              "takes values without scales that are ragged in their first dim, found {}",
              value.to_string());
}

}  // namespace

int64_t pages_of_rows(const ValueType& value, int64_t rows, int64_t page_bytes) {
  ValueType part = value;
  part.shape[0] = std::clamp<int64_t>(rows, 0, value.shape[0]);
  return (part.num_bytes() + page_bytes - 1) / page_bytes;
}

int64_t most_pages(const ValueType& value, int64_t page_bytes) {
  return pages_of_rows(value, value.shape[0], page_bytes);
}

PageCopy::PageCopy(int64_t page_bytes) : page_bytes_(page_bytes) {
  require(page_bytes > 0 && page_bytes % 16 == 0,
          "pages of {} bytes; they are multiples of 16 bytes", page_bytes);
}

std::string PageCopy::attributes() const {
  return fmt::format("page={} B", page_bytes_);
}

std::vector<ValueType> StashPages::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one value, found {}", inputs.size());
  check_value(*this, inputs[kValue]);
  std::vector<ValueType> types = pool_types(page_bytes());
  types.push_back(table_type(inputs[kValue], page_bytes()));
  return types;
}

Cost StashPages::cost(std::span<const ValueType> inputs,
                      std::span<const ValueType> /*outputs*/) const {
  return {.bytes = 2.0 * static_cast<double>(inputs[kValue].num_bytes())};
}

ReloadPages::ReloadPages(int64_t page_bytes, const ValueType& value)
    : PageCopy(page_bytes), value_(value) {
  check_value(*this, value_);
  value_.extent = Extent::own_input(kRows);
}

std::vector<ValueType> ReloadPages::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes a number of rows and a table, found {} inputs",
              inputs.size());
  check_shape(*this, inputs[kRows].dtype == DType::kI64 && inputs[kRows].shape.num_elements() == 1,
              "rows are {}, expected i64 [1]", inputs[kRows].to_string());
  const ValueType table = table_type(value_, page_bytes());
  check_shape(*this, inputs[kTable].dtype == table.dtype && inputs[kTable].shape == table.shape,
              "the table is {}, expected {}", inputs[kTable].to_string(), table.to_string());
  std::vector<ValueType> types = pool_types(page_bytes());
  types.push_back(value_);
  return types;
}

Cost ReloadPages::cost(std::span<const ValueType> /*inputs*/,
                       std::span<const ValueType> outputs) const {
  return {.bytes = 2.0 * static_cast<double>(outputs[kValue].num_bytes())};
}

OperatorPtr make_stash_pages(int64_t page_bytes) {
  return std::make_shared<StashPages>(page_bytes);
}

OperatorPtr make_reload_pages(int64_t page_bytes, const ValueType& value) {
  return std::make_shared<ReloadPages>(page_bytes, value);
}

}  // namespace tessera
