#include "ops/index_topk/index_topk.h"

#include <algorithm>
#include <memory>

namespace tessera {

IndexTopkOperator::IndexTopkOperator(const IndexSpec& spec) : spec_(spec) {
  require(
      spec.num_heads >= 1 && spec.head_size >= 1 && spec.top_k >= 1 && spec.sequence_length >= 0,
      "index_topk: {} heads of {} that choose {} keys: expected at least 1 of each", spec.num_heads,
      spec.head_size, spec.top_k);
}

std::string IndexTopkOperator::attributes() const {
  return fmt::format("heads={} head_size={} top_k={}", spec_.num_heads, spec_.head_size,
                     spec_.top_k);
}

std::vector<ValueType> IndexTopkOperator::infer_choice(std::span<const ValueType> inputs,
                                                       int num_bounds) const {
  check_shape(*this, std::ssize(inputs) == kFirstBound + num_bounds, "takes {} inputs, found {}",
              kFirstBound + num_bounds, inputs.size());
  const ValueType& q = inputs[kQ];
  check_shape(*this, is_storage(q.dtype) && q.shape.rank() == 2 && !q.ragged(),
              "queries must be f32 or bf16 [T, {} heads x {}], found {}", spec_.num_heads,
              spec_.head_size, q.to_string());
  const ValueType queries{q.dtype, {q.shape[0], spec_.num_heads * spec_.head_size}};
  check_shape(*this, q == queries, "queries are {}, expected {}", q.to_string(),
              queries.to_string());
  const ValueType weights{q.dtype, {q.shape[0], spec_.num_heads}};
  check_shape(*this, inputs[kWeights] == weights, "weights are {}, expected {}",
              inputs[kWeights].to_string(), weights.to_string());
  const ValueType& k = inputs[kKeys];
  check_shape(
      *this,
      k.dtype == q.dtype && k.shape.rank() == 2 && k.shape[1] == spec_.head_size && !k.ragged(),
      "keys are {}, expected {} [R, {}]", k.to_string(), dtype_name(q.dtype), spec_.head_size);
  return {{DType::kI32, {q.shape[0], spec_.top_k}}};
}

void IndexTopkOperator::check_i32(const ValueType& type, const Shape& shape,
                                  const char* what) const {
  const ValueType expected{DType::kI32, shape};
  check_shape(*this, type == expected, "{} is {}, expected {}", what, type.to_string(),
              expected.to_string());
}

double IndexTopkOperator::score_flops(double num_queries, double num_keys) const {
  const auto k = static_cast<double>(spec_.top_k);
  const auto pairs_up_to = [&](double length) {
    return length > k ? (length * (length + 1) - k * (k + 1)) / 2 : 0.0;
  };
  const double queries = std::min(num_queries, num_keys);
  return 2.0 * static_cast<double>(spec_.num_heads * (spec_.head_size + 1)) *
         (pairs_up_to(num_keys) - pairs_up_to(num_keys - queries));
}

int64_t IndexTopkOperator::typical_length(int64_t longest) const {
  return spec_.sequence_length > 0 ? std::min(spec_.sequence_length, longest) : longest;
}

std::vector<ValueType> IndexTopk::infer(std::span<const ValueType> inputs) const {
  std::vector<ValueType> choice = infer_choice(inputs, 1);
  check_shape(*this, inputs[kKeys].shape[0] == inputs[kQ].shape[0], "{} queries but {} keys",
              inputs[kQ].shape[0], inputs[kKeys].shape[0]);
  const ValueType& bounds = inputs[kCuSeqlens];
  check_shape(*this,
              bounds.dtype == DType::kI32 && bounds.shape.rank() == 1 && bounds.shape[0] >= 1,
              "cu_seqlens is {}, expected i32 [num_seqs + 1]", bounds.to_string());
  return choice;
}

Cost IndexTopk::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const int64_t num_tokens = inputs[kQ].shape[0];
  if (num_tokens == 0) return cost;
  const auto length = static_cast<double>(typical_length(num_tokens));
  cost.flops = static_cast<double>(num_tokens) / length * score_flops(length, length);
  return cost;
}

std::vector<ValueType> IndexTopkCached::infer(std::span<const ValueType> inputs) const {
  std::vector<ValueType> choice = infer_choice(inputs, 1);
  check_i32(inputs[kCacheLength], {1}, "cache_length");
  return choice;
}

Cost IndexTopkCached::cost(std::span<const ValueType> inputs,
                           std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const int64_t keys = typical_length(inputs[kKeys].shape[0]);
  cost.flops = score_flops(static_cast<double>(inputs[kQ].shape[0]), static_cast<double>(keys));
  return cost;
}

std::vector<ValueType> IndexTopkPaged::infer(std::span<const ValueType> inputs) const {
  std::vector<ValueType> choice = infer_choice(inputs, 3);
  const ValueType& table = inputs[kPageTable];
  check_shape(*this, table.dtype == DType::kI32 && table.shape.rank() == 2,
              "page_table is {}, expected i32 [S, M]", table.to_string());
  check_i32(inputs[kLengths], {table.shape[0]}, "lengths");
  check_i32(inputs[kCuSeqlens], {table.shape[0] + 1}, "cu_seqlens");
  return choice;
}

Cost IndexTopkPaged::cost(std::span<const ValueType> inputs,
                          std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const int64_t keys = typical_length(inputs[kKeys].shape[0]);
  cost.flops = static_cast<double>(inputs[kQ].shape[0]) * score_flops(1, static_cast<double>(keys));
  return cost;
}

IndexTopkEntries::IndexTopkEntries(const IndexSpec& spec, int64_t rate, KeptRows kept)
    : IndexTopkOperator(spec), rate_(rate), kept_(kept) {
  require(rate >= 1, "index_topk_entries: the rate must be at least 1, got {}", rate);
}

std::string_view IndexTopkEntries::name_of(KeptRows kept) {
  switch (kept) {
    case KeptRows::kPacked:
      return "index_topk_entries";
    case KeptRows::kCached:
      return "index_topk_entries_cached";
    case KeptRows::kPaged:
      return "index_topk_entries_paged";
  }
  throw InternalError("index_topk_entries: unknown rows");
}

std::string IndexTopkEntries::attributes() const {
  return fmt::format("{} rate={}", IndexTopkOperator::attributes(), rate_);
}

std::vector<ValueType> IndexTopkEntries::infer(std::span<const ValueType> inputs) const {
  std::vector<ValueType> choice = infer_choice(inputs, 1 + num_kept_inputs(kept_));
  check_i32(inputs[kPositions], {inputs[kQ].shape[0]}, "positions");
  check_kept_inputs(*this, kept_, inputs, kFirstKept);
  return choice;
}

/// Each number of entries is seen by `rate` tokens; tokens behind kept ones see all.
Cost IndexTopkEntries::cost(std::span<const ValueType> inputs,
                            std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const int64_t num_tokens = inputs[kQ].shape[0];
  if (num_tokens == 0) return cost;
  const auto tokens = static_cast<double>(num_tokens);
  if (kept_ != KeptRows::kPacked) {
    const auto entries = static_cast<double>(
        std::max<int64_t>(typical_length(inputs[kKeys].shape[0] * rate_) / rate_, 1));
    cost.flops = tokens * score_flops(1, entries);
    return cost;
  }
  const int64_t length = typical_length(num_tokens);
  const auto entries = static_cast<double>(length / rate_);
  cost.flops = tokens / static_cast<double>(length) * static_cast<double>(rate_) *
               score_flops(entries, entries);
  return cost;
}

OperatorPtr make_index_topk(const IndexSpec& spec) {
  return std::make_shared<IndexTopk>(spec);
}

OperatorPtr make_index_topk_entries(const IndexSpec& spec, int64_t rate, KeptRows kept) {
  return std::make_shared<IndexTopkEntries>(spec, rate, kept);
}

OperatorPtr make_index_topk_cached(const IndexSpec& spec) {
  return std::make_shared<IndexTopkCached>(spec);
}

OperatorPtr make_index_topk_paged(const IndexSpec& spec) {
  return std::make_shared<IndexTopkPaged>(spec);
}

}  // namespace tessera
