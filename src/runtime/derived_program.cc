#include "runtime/derived_program.h"

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

Tensor& slot(Bindings& bindings, ValueId id) {
  return bindings.tensors[id];
}

/// Gives a later program the forward values that it reads.
void share(const DerivedProgram& program, const Bindings& forward, const std::vector<Link>& links,
           Bindings& later) {
  for (const Link& link : links)
    slot(later, link.backward) = program.forward.at_bound(forward, link.forward);
}

using Extents = std::map<ValueId, int64_t>;

/// Those of the extents of forward values that a later program reads, as its own.
Extents hand_on(const Extents& forward, const Backward& later) {
  Extents own;
  for (const auto* links : {&later.saved, &later.bound}) {
    for (const Link& link : *links) {
      const auto known = forward.find(link.forward);
      if (known != forward.end()) own[link.backward] = known->second;
    }
  }
  return own;
}

}  // namespace

DerivedProgram derive(Program forward, const CompileOptions& options, const Backend& backend) {
  Compiled compiled = compile(std::move(forward), Goal::kTrain, options, backend);
  std::optional<Executable> weight_copies;
  if (!compiled.weight_copies.empty())
    weight_copies.emplace(make_copies_program(compiled.forward, compiled.weight_copies), backend);
  Executable forward_run(std::move(compiled.forward), backend, compiled.saved, {},
                         compiled.offloaded);
  const RowPlan& rows = forward_run.rows();
  const Extents told = hand_on(rows.balanced(), *compiled.backward);
  const Extents expected = hand_on(rows.expected(), *compiled.backward);
  Executable backward_run(std::exchange(compiled.backward->program, Program()), backend,
                          compiled.kept, told, {}, expected);
  std::optional<WeightPass> weights;
  if (compiled.weights) {
    Backward& derived = compiled.weights->derived;
    const Extents told_weights = hand_on(rows.balanced(), derived);
    const Extents expected_weights = hand_on(rows.expected(), derived);
    Executable run(std::exchange(derived.program, Program()), backend, {}, told_weights, {},
                   expected_weights);
    weights = {std::move(run), std::move(derived), std::move(compiled.weights->kept)};
  }
  return {.forward = std::move(forward_run),
          .derived = std::move(*compiled.backward),
          .backward = std::move(backward_run),
          .weights = std::move(weights),
          .weight_copies = std::move(weight_copies),
          .model_flops = compiled.model_flops};
}

Bindings bind_backward(const DerivedProgram& program, const Bindings& forward) {
  Bindings bindings = program.backward.make_bindings();
  share(program, forward, program.derived.saved, bindings);
  share(program, forward, program.derived.bound, bindings);
  return bindings;
}

Bindings bind_weight_pass(const DerivedProgram& program, const Bindings& forward,
                          const Bindings& backward) {
  const WeightPass& pass = *program.weights;
  Bindings bindings = pass.program.make_bindings();
  share(program, forward, pass.derived.saved, bindings);
  share(program, forward, pass.derived.bound, bindings);
  for (const Link& link : pass.derived.grad_outputs) {
    const auto given =
        std::ranges::find(program.derived.grad_outputs, link.forward, &Link::forward);
    slot(bindings, link.backward) = backward.tensors[given->backward];
  }
  for (const KeptValue& kept : pass.kept)
    slot(bindings, kept.weight_part) = program.backward.at_bound(backward, kept.input_part);
  return bindings;
}

}  // namespace tessera
