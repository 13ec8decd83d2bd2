#include "ops/page_stash/page_stash.h"

namespace tessera {
namespace {

std::vector<ValueType> pool_types(const PagePool& pool, const ValueType& value) {
  return {{DType::kU8, {pool.num_pages * pool.page_bytes}},
          {DType::kI32, {pool.num_pages}},
          {DType::kI64, {kPoolStates}},
          {DType::kI32, {most_pages(value, pool)}}};
}

void check_value(const Operator& op, const ValueType& value) {
  check_shape(op, value.ragged_dim == 0 && value.scale == ScaleLayout(),
              "takes values without scales that are ragged in their first dim, found {}",
              value.to_string());
}

}  // namespace

int64_t most_pages(const ValueType& value, const PagePool& pool) {
  return (value.num_bytes() + pool.page_bytes - 1) / pool.page_bytes;
}

PageCopy::PageCopy(const PagePool& pool) : pool_(pool) {
  require(pool.num_pages >= 0 && pool.page_bytes > 0 && pool.page_bytes % 16 == 0,
          "a pool of {} pages of {} bytes; pages are multiples of 16 bytes", pool.num_pages,
          pool.page_bytes);
}

std::string PageCopy::attributes() const {
  return fmt::format("pages={} x {} B", pool_.num_pages, pool_.page_bytes);
}

std::vector<ValueType> StashPages::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one value, found {}", inputs.size());
  check_value(*this, inputs[kValue]);
  return pool_types(pool(), inputs[kValue]);
}

Cost StashPages::cost(std::span<const ValueType> inputs,
                      std::span<const ValueType> /*outputs*/) const {
  return {.bytes = 2.0 * static_cast<double>(inputs[kValue].num_bytes())};
}

ReloadPages::ReloadPages(const PagePool& pool, const ValueType& value)
    : PageCopy(pool), value_(value) {
  check_value(*this, value_);
  value_.extent = Extent::own_input(kRows);
}

std::vector<ValueType> ReloadPages::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes a number of rows, found {} inputs", inputs.size());
  check_shape(*this, inputs[kRows].dtype == DType::kI64 && inputs[kRows].shape.num_elements() == 1,
              "rows are {}, expected i64 [1]", inputs[kRows].to_string());
  std::vector<ValueType> types = pool_types(pool(), value_);
  types.insert(types.begin(), value_);
  return types;
}

Cost ReloadPages::cost(std::span<const ValueType> /*inputs*/,
                       std::span<const ValueType> outputs) const {
  return {.bytes = 2.0 * static_cast<double>(outputs[kValue].num_bytes())};
}

OperatorPtr make_stash_pages(const PagePool& pool) {
  return std::make_shared<StashPages>(pool);
}

OperatorPtr make_reload_pages(const PagePool& pool, const ValueType& value) {
  return std::make_shared<ReloadPages>(pool, value);
}

}  // namespace tessera
