#include "ops/testing/program_run.h"

#include <algorithm>

namespace tessera::testing {
namespace {

std::vector<ValueId> forward_values(const std::vector<Link>& links) {
  std::vector<ValueId> ids;
  for (const Link& link : links) ids.push_back(link.forward);
  return ids;
}

}  // namespace

ProgramRun::ProgramRun(Program forward, const DifferentiateRequest& request, const Backend& backend)
    : forward_(std::move(forward)),
      backward_(differentiate(forward_, request)),
      forward_run_(forward_, backend, forward_values(backward_.saved)),
      backward_run_(backward_.program, backend),
      device_(forward_run_.backend().device()),
      // Never empty, so that no saved value of zero elements looks unbound.
      saved_(std::max<int64_t>(forward_run_.plan().saved_bytes, 1), "saved values", device_),
      transient_(
          std::max(forward_run_.plan().transient_bytes, backward_run_.plan().transient_bytes),
          "transient values", device_) {
  bind_forward();
  bind_backward();
}

void ProgramRun::bind_forward() {
  forward_bindings_ = forward_run_.make_bindings();
  forward_bindings_.saved = saved_.data();
  forward_bindings_.transient = transient_.data();
  for (ValueId id = 0; id < forward_.num_values(); ++id) {
    if (forward_.value(id).kind == ValueKind::kIntermediate && !forward_.is_output(id)) continue;
    const ValueType& type = forward_.type(id);
    values_.emplace(id, OwnedTensor(type.dtype, type.shape));
    forward_bindings_.tensors[id] = bound(value(id));
  }
}

void ProgramRun::bind_backward() {
  backward_bindings_ = backward_run_.make_bindings();
  backward_bindings_.transient = transient_.data();
  const auto tensor = [&](ValueId id) -> Tensor& { return backward_bindings_.tensors[id]; };
  for (const auto* links : {&backward_.saved, &backward_.bound}) {
    for (const Link& link : *links) {
      tensor(link.backward) = forward_run_.at_bound(forward_bindings_, link.forward);
    }
  }
  for (const auto* links :
       {&backward_.grad_outputs, &backward_.grad_inputs, &backward_.accumulators}) {
    for (const Link& link : *links) {
      const ValueType& type = backward_.program.type(link.backward);
      const auto [memory, is_new] = grads_.try_emplace(link.backward, type.dtype, type.shape);
      if (is_new) tensor(link.backward) = bound(memory->second);
      grad_values_[link.forward] = link.backward;
    }
  }
}

/// The memory that programs are bound to for a value of the host.
Tensor ProgramRun::bound(const Tensor& host) {
  if (device_.is_host()) return host;
  copies_.push_back({host, OwnedTensor(host.dtype, host.shape, "a test's value", device_)});
  return copies_.back().there;
}

void ProgramRun::run(const Executable& program, const Bindings& bindings) const {
  for (const Copy& copy : copies_)
    device_.copy(copy.there.get().data, copy.host.data, copy.host.num_bytes());
  program.run(bindings);
  device_.synchronize();
  for (const Copy& copy : copies_)
    device_.copy(copy.host.data, copy.there.get().data, copy.host.num_bytes());
}

Tensor ProgramRun::value(ValueId id) const {
  const auto at = values_.find(id);
  ensure(at != values_.end(), "value {} of program '{}' is not bound", id, forward_.name());
  return at->second;
}

Tensor ProgramRun::grad(ValueId id) const {
  const auto at = grad_values_.find(id);
  ensure(at != grad_values_.end(), "value {} of program '{}' has no gradient", id, forward_.name());
  return grads_.at(at->second);
}

}  // namespace tessera::testing
