#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/max_logits/max_logits.h"

namespace tessera {
namespace {

using Op = MaxLogits;

constexpr int64_t kRows = 32;  ///< queries that a thread takes at a time

template <typename T>
float dot(const T* __restrict a, const T* __restrict b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  return sum;
}

/// The tokens of its sequence that the query of `token` sees; none where no sequence has it.
IndexRange visible_keys(std::span<const int32_t> cu_seqlens, int64_t token, int64_t window) {
  size_t sequence = 0;
  for (size_t end = cu_seqlens.size(); end - sequence > 1;) {
    const size_t middle = (sequence + end) / 2;
    (cu_seqlens[middle] <= token ? sequence : end) = middle;
  }
  if (token < cu_seqlens[sequence] || token >= cu_seqlens.back()) return {};
  int64_t first = cu_seqlens[sequence];
  if (window > 0) first = std::max(first, token - window + 1);
  return {first, token - first + 1};
}

template <typename T>
class Rows {
 public:
  Rows(const Op& op, const Args<Op>& args)
      : spec_(op.spec()),
        limit_(op.limit()),
        group_(op.group_size()),
        rows_(op.rows()),
        q_(args.in(Op::kQ)),
        k_(args.in(Op::kK)),
        lse_(args.in(Op::kLse).as<float>()),
        cu_seqlens_(args.in(Op::kCuSeqlens).template span<int32_t>()) {}

  int64_t num_rows() const { return q_.shape[0]; }

  float value(int64_t head, int64_t row) const {
    const IndexRange keys = visible_keys(cu_seqlens_, rows_.token_of_query(row), spec_.window);
    if (keys.count == 0) return kNoLogit;
    const float lse = lse_[head * num_rows() + row];
    return lse > limit_ ? largest(head, row, keys) : lse;
  }

 private:
  float largest(int64_t head, int64_t row, const IndexRange& keys) const {
    const int64_t size = spec_.head_size;
    const T* const query = q_.as<T>() + (row * spec_.num_heads + head) * size;
    const T* const all_keys = k_.as<T>() + head / group_ * size;
    float most = kNoLogit;
    for (int64_t token = keys.begin; token < keys.end(); ++token) {
      const int64_t at = rows_.row_of_key(token) * spec_.num_kv_heads * size;
      most = std::max(most, dot(query, all_keys + at, size) * static_cast<float>(spec_.scale));
    }
    return most;
  }

  const AttentionSpec& spec_;
  float limit_;
  int64_t group_;
  TokenRows rows_;
  const Tensor& q_;
  const Tensor& k_;
  const float* lse_;
  std::span<const int32_t> cu_seqlens_;
};

int64_t num_parts(int64_t num_rows) {
  return (num_rows + kRows - 1) / kRows;
}

/// The largest value of each part of the rows, then of each head's parts.
template <typename T>
void find_max(const Op& op, const Args<Op>& args) {
  const Rows<T> rows(op, args);
  const int64_t heads = op.spec().num_heads;
  const int64_t parts = num_parts(rows.num_rows());
  auto* const of_parts = reinterpret_cast<float*>(args.workspace.data());
#pragma omp parallel for schedule(dynamic)
  for (int64_t item = 0; item < heads * parts; ++item) {
    const int64_t begin = item % parts * kRows;
    float most = kNoLogit;
    for (int64_t row = begin; row < std::min(begin + kRows, rows.num_rows()); ++row)
      most = std::max(most, rows.value(item / parts, row));
    of_parts[item] = most;
  }
  float* const result = args.out(Op::kMax).template as<float>();
  for (int64_t head = 0; head < heads; ++head) {
    result[head] = kNoLogit;
    for (int64_t part = 0; part < parts; ++part)
      result[head] = std::max(result[head], of_parts[head * parts + part]);
  }
}

void max_logits(const Op& op, const Args<Op>& args) {
  args.in(Op::kQ).dtype == DType::kF32 ? find_max<float>(op, args) : find_max<Bf16>(op, args);
}

int64_t max_logits_workspace(const Op& op, std::span<const ValueType> inputs) {
  return op.spec().num_heads * num_parts(inputs[Op::kQ].shape[0]) *
         static_cast<int64_t>(sizeof(float));
}

}  // namespace

TESSERA_CPU_KERNELS(add_max_logits_cpu, table) {
  add_kernel<MaxLogits>(table, max_logits, {.workspace = max_logits_workspace});
}

}  // namespace tessera
