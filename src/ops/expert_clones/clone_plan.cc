#include "ops/expert_clones/clone_plan.h"

namespace tessera {
namespace {

ValueType numbers(int64_t count) {
  return {.dtype = DType::kI64, .shape = {count}};
}

void check_numbers(const Operator& op, const ValueType& type, int64_t count, const char* what) {
  check_shape(op, type == numbers(count), "{} must be {}, got {}", what, numbers(count).to_string(),
              type.to_string());
}

}  // namespace

std::string CloneSlots::to_string() const {
  return fmt::format("experts={} ranks={} slots={}", num_experts, num_ranks, slots_per_rank);
}

ClonePlan::ClonePlan(const CloneSlots& slots) : slots_(slots) {
  ensure(slots.num_ranks >= 1 && slots.num_experts >= slots.num_ranks &&
             slots.num_experts % slots.num_ranks == 0 && slots.slots_per_rank >= 1 &&
             slots.rank >= 0 && slots.rank < slots.num_ranks,
         "clone_plan: rank {} of {}", slots.rank, slots.to_string());
}

std::vector<ValueType> ClonePlan::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes the counts, got {} inputs", inputs.size());
  check_numbers(*this, inputs[kCounts], slots_.num_ranks * slots_.num_experts, "counts");
  const ValueType by_slot = numbers(slots_.num_slots());
  return {by_slot, by_slot, by_slot};
}

std::vector<ValueType> CloneRoute::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 6,
              "takes expert_idx, row_of_TK, offsets, slots, begins and ends, got {} inputs",
              inputs.size());
  const ValueType& expert_idx = inputs[kExpertIdx];
  check_shape(*this,
              expert_idx.dtype == DType::kI32 && expert_idx.shape.rank() == 2 &&
                  !expert_idx.ragged() && inputs[kRowOf] == expert_idx,
              "expert_idx and row_of_TK must be i32 [T, K], got {} and {}", expert_idx.to_string(),
              inputs[kRowOf].to_string());
  check_numbers(*this, inputs[kOffsets], slots_.num_experts + 1, "offsets");
  check_numbers(*this, inputs[kSlots], slots_.num_slots(), "slots");
  check_numbers(*this, inputs[kBegins], slots_.num_slots(), "begins");
  check_numbers(*this, inputs[kEnds], slots_.num_slots(), "ends");
  return {expert_idx, expert_idx};
}

OperatorPtr make_clone_plan(const CloneSlots& slots) {
  return std::make_shared<ClonePlan>(slots);
}

OperatorPtr make_clone_route(const CloneSlots& slots) {
  return std::make_shared<CloneRoute>(slots);
}

}  // namespace tessera
