#include "model/run/layer_binder.h"

namespace tessera {
namespace {

Tensor& slot(Bindings& bindings, ValueId id) {
  return bindings.tensors[id];
}

void bind_gradients(const std::vector<Link>& links, const PortMap& ports,
                    const PortTensors& gradients, Bindings& bindings) {
  for (const Link& link : links)
    slot(bindings, link.backward) = gradients.at(ports.port_of(link.forward));
}

/// The inputs, outputs and accumulators of these names.
void bind_copy_tensors(const Program& program, const CopyTensors& copies, Bindings& bindings) {
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    const auto found = copies.find(value.name);
    if (found == copies.end()) continue;
    if (value.kind == ValueKind::kInput || value.kind == ValueKind::kAccumulator ||
        program.is_output(id))
      slot(bindings, id) = found->second;
  }
}

}  // namespace

BoundProgram LayerBinder::join(const Executable& run, const Program& forward,
                               const std::vector<Link>& accumulators, std::byte* working,
                               Bindings bindings) const {
  BoundProgram bound = {
      .program = &run,
      .bindings = std::move(bindings),
      .parameters = find_parameters(run.program(), forward, accumulators, parameters_, names_)};
  if (copies_ != nullptr) bind_copy_tensors(run.program(), *copies_, bound.bindings);
  bound.bindings.transient = working;
  bound.bindings.elastic = elastic_;
  run.commit(bound.bindings);
  bind_parameters(bound.parameters, parameters_, bound.bindings);
  return bound;
}

BoundProgram LayerBinder::bind_forward(const Executable& run, const ModelProgram& layout,
                                       const PortTensors& tensors, std::byte* saved,
                                       std::byte* offloaded) const {
  Bindings bindings = run.make_bindings();
  bindings.saved = saved;
  bindings.offloaded = offloaded;
  for (const PortRule& rule : port_rules()) {
    if (layout.has(rule.port)) slot(bindings, layout.at(rule.port)) = tensors.at(rule.port);
  }
  return join(run, run.program(), layout.accumulators, working_.forward, std::move(bindings));
}

BoundProgram LayerBinder::bind_backward(const DerivedProgram& program, const ModelProgram& layout,
                                        const Bindings& forward, const PortGradients& gradients,
                                        std::byte* kept) const {
  Bindings bindings = tessera::bind_backward(program, forward);
  bindings.saved = kept;
  bind_gradients(program.derived.grad_outputs, layout.ports, gradients.given, bindings);
  bind_gradients(program.derived.grad_inputs, layout.ports, gradients.wanted, bindings);
  return join(program.backward, program.forward.program(), program.derived.accumulators,
              working_.backward, std::move(bindings));
}

BoundProgram LayerBinder::bind_weights(const DerivedProgram& program, const Bindings& forward,
                                       const Bindings& backward) const {
  return join(program.weights->program, program.forward.program(),
              program.weights->derived.accumulators, working_.backward,
              bind_weight_pass(program, forward, backward));
}

BoundProgram LayerBinder::bind_copies(const DerivedProgram& program) const {
  const Executable& run = *program.weight_copies;
  return join(run, run.program(), {}, working_.forward, run.make_bindings());
}

}  // namespace tessera
