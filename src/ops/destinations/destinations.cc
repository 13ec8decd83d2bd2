#include "ops/destinations/destinations.h"

#include "ops/permute/row_maps.h"

namespace tessera {
namespace {

void check_choices(const Operator& op, const ValueType& expert_idx) {
  check_shape(
      op,
      expert_idx.dtype == DType::kI32 && expert_idx.shape.rank() == 2 && expert_idx.ragged_dim < 1,
      "expert_idx must be i32 [T, K], got {}", expert_idx.to_string());
}

}  // namespace

Destinations::Destinations(const DestinationsSpec& spec) : spec_(spec) {
  ensure(spec.members >= 1 && spec.experts_each >= 1 && spec.first_expert >= 0,
         "destinations: {} members with {} experts each from expert {}", spec.members,
         spec.experts_each, spec.first_expert);
}

std::string Destinations::attributes() const {
  std::string text = fmt::format("members={} experts_each={}", spec_.members, spec_.experts_each);
  if (spec_.first_expert > 0) text += fmt::format(" first_expert={}", spec_.first_expert);
  return text;
}

std::vector<ValueType> Destinations::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes expert_idx, got {} inputs", inputs.size());
  check_choices(*this, inputs[kExpertIdx]);
  return {inputs[kExpertIdx]};
}

std::vector<ValueType> PermuteChoices::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes expert_idx and source_R, got {} inputs",
              inputs.size());
  check_choices(*this, inputs[kExpertIdx]);
  check_source(*this, inputs[kSource]);
  return {rows_like(inputs[kSource], DType::kI32, inputs[kExpertIdx].shape[1])};
}

OperatorPtr make_destinations(const DestinationsSpec& spec) {
  return std::make_shared<Destinations>(spec);
}

OperatorPtr make_permute_choices() {
  return std::make_shared<PermuteChoices>();
}

}  // namespace tessera
