#include "ops/paged_attention/paged_attention.h"

#include "ops/storage.h"

namespace tessera {
namespace {

bool is_i32(const ValueType& type, int rank) {
  return type.dtype == DType::kI32 && type.shape.rank() == rank;
}

}  // namespace

PageWrite::PageWrite(int64_t capacity) : capacity_(capacity) {
  require(capacity >= 0, "page_write: capacity = {} must not be negative", capacity);
}

std::string PageWrite::attributes() const {
  return fmt::format("capacity={}", capacity_);
}

std::vector<ValueType> PageWrite::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes rows and cache_rows, found {} inputs",
              inputs.size());
  const ValueType& rows = inputs[kRows];
  const ValueType& to = inputs[kCacheRows];
  check_shape(*this, is_storage(rows.dtype) && rows.shape.rank() == 2,
              "rows are {}, expected f32 or bf16 [T, C]", rows.to_string());
  check_shape(*this, is_i32(to, 1) && to.shape[0] == rows.shape[0],
              "cache_rows is {}, expected i32 [{}]", to.to_string(), rows.shape[0]);
  return {{rows.dtype, {capacity_, rows.shape[1]}}};
}

Cost PageWrite::cost(std::span<const ValueType> inputs,
                     std::span<const ValueType> /*outputs*/) const {
  return {.bytes = 2.0 * static_cast<double>(inputs[kRows].num_bytes())};
}

std::vector<ValueType> PagedAttention::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 6,
              "takes q, pages of keys and values, cu_seqlens, lengths and page_table, found {} "
              "inputs",
              inputs.size());
  check_qkv(inputs[kQ], inputs[kKeyPages], inputs[kValuePages]);
  const ValueType& bounds = inputs[kCuSeqlens];
  const ValueType& lengths = inputs[kLengths];
  const ValueType& table = inputs[kPageTable];
  check_shape(*this, inputs[kKeyPages].shape[0] % kPageTokens == 0,
              "{} rows of keys are not whole pages of {}", inputs[kKeyPages].shape[0], kPageTokens);
  check_shape(*this, is_i32(lengths, 1), "lengths is {}, expected i32 [S]", lengths.to_string());
  check_shape(*this, is_i32(bounds, 1) && bounds.shape[0] == lengths.shape[0] + 1,
              "cu_seqlens is {}, expected i32 [{}]", bounds.to_string(), lengths.shape[0] + 1);
  check_shape(*this, is_i32(table, 2) && table.shape[0] == lengths.shape[0],
              "page_table is {}, expected i32 [{}, M]", table.to_string(), lengths.shape[0]);
  const int64_t num_tokens = inputs[kQ].shape[0];
  return {with_last_dim(inputs[kQ], spec().num_heads * spec().head_size_v),
          {DType::kF32, {spec().num_heads, num_tokens}}};
}

Cost PagedAttention::cost(std::span<const ValueType> inputs,
                          std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const int64_t hint = spec().sequence_length;
  const int64_t keys = hint > 0 ? hint : inputs[kPageTable].shape[1] * kPageTokens;
  cost.flops =
      static_cast<double>(inputs[kQ].shape[0]) * sequence_flops(1, static_cast<double>(keys));
  return cost;
}

OperatorPtr make_page_write(int64_t capacity) {
  return std::make_shared<PageWrite>(capacity);
}

OperatorPtr make_paged_attention(const AttentionSpec& spec) {
  return std::make_shared<PagedAttention>(spec);
}

}  // namespace tessera
