#pragma once

#include "ops/operator.h"

namespace tessera {

/// Writes new rows into a cache, in place: for generation's keys and values.
///
/// Inputs rows A [T, C] and start I32 [1]; the output is the cache A [capacity, C], F32 or BF16,
/// bound from outside as accumulators are. Rows start to start + T of the cache become `rows`, the
/// others stay. UserError where they do not fit. No gradient.
class CacheAppend final : public Operator {
 public:
  static constexpr std::string_view kName = "cache_append";
  enum Input : int { kRows, kStart };
  enum Output : int { kCache };

  explicit CacheAppend(int64_t capacity);
  int64_t capacity() const { return capacity_; }
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
  bool recomputable() const override { return false; }

 private:
  int64_t capacity_;
};

OperatorPtr make_cache_append(int64_t capacity);

void add_cache_append_cpu(KernelTable& table);
/// The kernel for Hopper GPUs finds out on the GPU that rows do not fit, and ends the program's
/// work there: the next synchronisation throws.
void add_cache_append_cuda(KernelTable& table);

}  // namespace tessera
