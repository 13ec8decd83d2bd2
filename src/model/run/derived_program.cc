#include "model/run/derived_program.h"

#include <algorithm>
#include <set>

#include "core/names.h"
#include "model/build/join_expert_blocks.h"
#include "program/fuse_producers.h"
#include "program/fuse_repeats.h"
#include "program/fuse_sums.h"
#include "program/schedule.h"

namespace tessera {
namespace {

bool may_run_twice(const Program& program, ValueId id) {
  for (const Node& node : program.nodes()) {
    if (std::ranges::find(node.outputs, id) != node.outputs.end()) return node.op->recomputable();
  }
  return false;
}

/// Whether the backward pass makes a value again instead of reading it, where it needs it.
bool is_dropped(const Program& forward, ValueId id, const RecomputePolicy& policy) {
  const bool listed = std::ranges::find(policy, forward.value(id).name) != policy.end();
  const bool all = std::ranges::find(policy, "all") != policy.end();
  return listed || (all && may_run_twice(forward, id));
}

std::vector<ValueId> choose_dropped(const Program& forward, const Backward& backward,
                                    const RecomputePolicy& policy) {
  std::vector<ValueId> dropped;
  for (const Link& link : backward.saved) {
    if (is_dropped(forward, link.forward, policy)) dropped.push_back(link.forward);
  }
  return dropped;
}

}  // namespace

DerivedProgram derive(Program forward, const DifferentiateRequest& request,
                      const DeriveOptions& options, const Backend& backend) {
  forward = fuse_sums(forward);
  if (!backend.is_host()) forward = join_expert_blocks(forward);
  const auto made_again = [&](ValueId id) { return is_dropped(forward, id, options.recompute); };
  forward = fuse_gathers(forward, options.gathers, backend,
                         {.differentiated = true, .made_again = made_again});
  Backward backward = differentiate(forward, request);
  backward.program = fuse_sums(backward.program);
  const double model_flops = forward.cost().flops + backward.program.cost().flops;
  const auto dropped = choose_dropped(forward, backward, options.recompute);
  if (!dropped.empty()) backward = recompute(forward, backward, dropped);
  // Rows that are made again, too.
  backward.program = fuse_gathers(backward.program, options.gathers, backend, {});
  std::vector<ValueId> saved;
  for (const Link& link : backward.saved) saved.push_back(link.forward);
  // Exchanges begin early, and computation stands between their start and their first use.
  const ScheduleOptions as_scheduled{
      .memory_growth = 0.1,
      .workspace = [&](const Operator& op, std::span<const ValueType> inputs) {
        return backend.workspace_bytes(op, inputs);
      }};
  const auto plan = [&](const Program& program, const std::vector<ValueId>& kept) {
    const Program joined = options.fuse_activations ? fuse_producers(program, kept) : program;
    return Executable(schedule(fuse_repeats(joined), kept, as_scheduled), backend, kept);
  };
  Executable forward_run = plan(forward, saved);
  if (!options.split_weights) {
    Executable backward_run = plan(backward.program, {});
    return {std::move(forward_run), std::move(backward), std::move(backward_run), std::nullopt,
            model_flops};
  }
  SplitBackward parts = split_weights(backward);
  Executable backward_run = plan(parts.input.program, parts.kept_intermediates());
  Executable weight_run = plan(parts.weight.program, {});
  return {std::move(forward_run), std::move(parts.input), std::move(backward_run),
          WeightPass{std::move(weight_run), std::move(parts.weight), std::move(parts.kept)},
          model_flops};
}

void check_recompute_names(const RecomputePolicy& policy, const std::vector<Program>& programs) {
  std::set<std::string> known = {"all"};
  for (const Program& program : programs) {
    for (const Value& value : program.values()) {
      if (value.kind == ValueKind::kIntermediate) known.insert(value.name);
    }
  }
  const std::vector<std::string> names(known.begin(), known.end());
  for (const std::string& name : policy) {
    require(known.contains(name),
            "train.recompute names '{}', which is no value of a layer{}; `tessera inspect "
            "--program` lists them",
            name, did_you_mean(name, names));
  }
}

void bind_weights(const Program& program, const TensorByName& weight, Bindings& bindings) {
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kWeight)
      bindings.tensors[static_cast<size_t>(id)] = weight(value.name);
  }
}

Bindings bind_backward(const DerivedProgram& program, const Bindings& forward,
                       const TensorByName& grad) {
  Bindings bindings = program.backward.make_bindings();
  const auto share = [&](const Link& link) {
    bindings.tensors[static_cast<size_t>(link.backward)] =
        program.forward.at_bound(forward, link.forward);
  };
  std::ranges::for_each(program.derived.saved, share);
  std::ranges::for_each(program.derived.bound, share);
  for (const Link& link : program.derived.accumulators) {
    bindings.tensors[static_cast<size_t>(link.backward)] =
        grad(program.forward.program().value(link.forward).name);
  }
  return bindings;
}

Bindings bind_weight_pass(const DerivedProgram& program, const Bindings& forward,
                          const Bindings& backward, const TensorByName& grad) {
  const WeightPass& pass = *program.weights;
  Bindings bindings = pass.program.make_bindings();
  const auto set = [&](ValueId id, const Tensor& tensor) {
    bindings.tensors[static_cast<size_t>(id)] = tensor;
  };
  for (const auto* links : {&pass.derived.saved, &pass.derived.bound}) {
    for (const Link& link : *links)
      set(link.backward, program.forward.at_bound(forward, link.forward));
  }
  for (const Link& link : pass.derived.grad_outputs) {
    const auto given =
        std::ranges::find(program.derived.grad_outputs, link.forward, &Link::forward);
    set(link.backward, backward.tensors[static_cast<size_t>(given->backward)]);
  }
  for (const Link& link : pass.derived.accumulators)
    set(link.backward, grad(program.forward.program().value(link.forward).name));
  for (const KeptValue& kept : pass.kept)
    set(kept.weight_part, program.backward.at_bound(backward, kept.input_part));
  return bindings;
}

}  // namespace tessera
