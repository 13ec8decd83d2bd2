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

}  // namespace

BoundProgram LayerBinder::join(const Executable& run, const Program& forward,
                               const std::vector<Link>& accumulators, Bindings bindings) const {
  BoundProgram bound = {
      .program = &run,
      .bindings = std::move(bindings),
      .parameters = find_parameters(run.program(), forward, accumulators, parameters_, prefix_)};
  bound.bindings.transient = transient_;
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
  return join(run, run.program(), layout.accumulators, std::move(bindings));
}

BoundProgram LayerBinder::bind_backward(const DerivedProgram& program, const ModelProgram& layout,
                                        const Bindings& forward, const PortGradients& gradients,
                                        std::byte* kept) const {
  Bindings bindings = tessera::bind_backward(program, forward);
  bindings.saved = kept;
  bind_gradients(program.derived.grad_outputs, layout.ports, gradients.given, bindings);
  bind_gradients(program.derived.grad_inputs, layout.ports, gradients.wanted, bindings);
  return join(program.backward, program.forward.program(), program.derived.accumulators,
              std::move(bindings));
}

BoundProgram LayerBinder::bind_weights(const DerivedProgram& program, const Bindings& forward,
                                       const Bindings& backward) const {
  return join(program.weights->program, program.forward.program(),
              program.weights->derived.accumulators, bind_weight_pass(program, forward, backward));
}

}  // namespace tessera
