#include "ops/slot_experts/slot_experts.h"

#include <limits>

namespace tessera {

SlotExperts::SlotExperts(const SlotExpertsSpec& spec) : spec_(spec) {
  ensure(spec.num_experts >= 1 && spec.slot_rows >= 0,
         "slot_experts: slots of {} experts and {} rows", spec.num_experts, spec.slot_rows);
}

std::string SlotExperts::attributes() const {
  return fmt::format("experts={} slot_rows={}", spec_.num_experts, spec_.slot_rows);
}

std::vector<ValueType> SlotExperts::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes the counts, got {} inputs", inputs.size());
  const ValueType& counts = inputs[kCounts];
  check_shape(*this,
              counts.dtype == DType::kI64 && counts.shape.rank() == 1 && !counts.ragged() &&
                  counts.shape[0] % spec_.num_experts == 0,
              "counts must be i64 [slots * {}], got {}", spec_.num_experts, counts.to_string());
  const int64_t rows = counts.shape[0] / spec_.num_experts * spec_.slot_rows;
  check_shape(*this, rows <= std::numeric_limits<int32_t>::max(),
              "slots of {} rows in all, more than 2^31 - 1; use smaller micro-batches", rows);
  return {{.dtype = DType::kI32, .shape = {rows}}};
}

OperatorPtr make_slot_experts(const SlotExpertsSpec& spec) {
  return std::make_shared<SlotExperts>(spec);
}

}  // namespace tessera
