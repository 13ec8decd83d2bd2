#include "ops/expert_clones/clone_weights.h"

namespace tessera {
namespace {

void check_group(const Communicator& comm, const CloneSlots& slots) {
  ensure(comm.size() == slots.num_ranks && comm.rank() == slots.rank,
         "clones of {} over rank {} of {} in group '{}'", slots.to_string(), comm.rank(),
         comm.size(), comm.name());
}

std::string describe(const std::string& group, const CloneSlots& slots) {
  return fmt::format("{} experts={} slots={}", group, slots.num_experts, slots.slots_per_rank);
}

/// Checks a matrix of `num_blocks` blocks, and the slots behind it; the type of as many others.
ValueType with_blocks(const Operator& op, std::span<const ValueType> inputs,
                      const CloneSlots& slots, int64_t num_blocks, int64_t num_others) {
  check_shape(op, inputs.size() == 2, "takes blocks of rows and slots, got {} inputs",
              inputs.size());
  const ValueType& x = inputs[0];
  check_shape(op,
              is_storage(x.dtype) && x.shape.rank() >= 1 && !x.ragged() && !x.scale.is_scaled() &&
                  x.shape[0] % num_blocks == 0,
              "blocks must be f32 or bf16 [{} · B, ...], got {}", num_blocks, x.to_string());
  const ValueType by_slot{.dtype = DType::kI64, .shape = {slots.num_slots()}};
  check_shape(op, inputs[1] == by_slot, "slots must be {}, got {}", by_slot.to_string(),
              inputs[1].to_string());
  ValueType others{.dtype = x.dtype, .shape = x.shape};
  others.shape[0] = x.shape[0] / num_blocks * num_others;
  return others;
}

void check_gradient(const Operator& op, const ValueType& grad) {
  check_shape(op, grad.dtype == DType::kF32, "the gradient must be f32, got {}", grad.to_string());
}

}  // namespace

CloneWeights::CloneWeights(CommunicatorPtr comm, const CloneSlots& slots)
    : CollectiveOperator(std::move(comm)), slots_(slots) {
  check_group(this->comm(), slots);
}

std::string CloneWeights::attributes() const {
  return describe(CollectiveOperator::attributes(), slots_);
}

std::vector<ValueType> CloneWeights::infer(std::span<const ValueType> inputs) const {
  return {with_blocks(*this, inputs, slots_, slots_.num_local(), slots_.slots_per_rank)};
}

void CloneWeights::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad || !builder.needs_grad(kWeight)) return;
  const ValueId slots = builder.input(kSlots);
  const ValueId returned =
      builder.emit(std::make_shared<ReturnClones>(comm_ptr(), slots_), {*grad, slots})[0];
  builder.emit(std::make_shared<AddClones>(slots_), {returned, slots}, {kWeight});
}

ReturnClones::ReturnClones(CommunicatorPtr comm, const CloneSlots& slots)
    : CollectiveOperator(std::move(comm)), slots_(slots) {
  check_group(this->comm(), slots);
}

std::string ReturnClones::attributes() const {
  return describe(CollectiveOperator::attributes(), slots_);
}

std::vector<ValueType> ReturnClones::infer(std::span<const ValueType> inputs) const {
  const ValueType returned =
      with_blocks(*this, inputs, slots_, slots_.slots_per_rank, slots_.max_clones());
  check_gradient(*this, inputs[kGrad]);
  return {returned};
}

std::vector<ValueType> AddClones::infer(std::span<const ValueType> inputs) const {
  const ValueType sum = with_blocks(*this, inputs, slots_, slots_.max_clones(), slots_.num_local());
  check_gradient(*this, inputs[kReturned]);
  return {sum};
}

OperatorPtr make_clone_weights(CommunicatorPtr comm, const CloneSlots& slots) {
  return std::make_shared<CloneWeights>(std::move(comm), slots);
}

}  // namespace tessera
