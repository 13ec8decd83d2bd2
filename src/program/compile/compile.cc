#include "program/compile/compile.h"

#include <algorithm>

#include "program/compile/keep_quantized.h"
#include "program/compile/quantize_early.h"
#include "program/compile/quantize_saved.h"
#include "program/compile/schedule.h"
#include "program/compile/set_aside.h"
#include "program/compile/stash_rows.h"
#include "program/fusion/fuse_gathers.h"
#include "program/fusion/fuse_producers.h"
#include "program/fusion/fuse_quantize.h"
#include "program/fusion/fuse_repeats.h"
#include "program/fusion/fuse_sums.h"
#include "program/fusion/join_expert_blocks.h"
#include "program/fusion/join_products.h"
#include "program/rounding/fp8_products.h"

namespace tessera {
namespace {

bool always(const Compilation& /*c*/) {
  return true;
}
bool in_training(const Compilation& c) {
  return c.goal == Goal::kTrain;
}
bool on_devices(const Compilation& c) {
  return in_training(c) && !c.backend.is_host();
}
bool where_side_lane(const Compilation& c) {
  return in_training(c) && c.backend.side_lane() != nullptr;
}
bool where_recomputing(const Compilation& c) {
  return in_training(c) && !c.options.recompute.empty();
}
bool where_rounding(const Compilation& c) {
  return c.options.rounding.has_value();
}
bool where_rounding_on_devices(const Compilation& c) {
  return where_rounding(c) && !c.backend.is_host();
}
bool where_keeping_rounded(const Compilation& c) {
  return in_training(c) && where_rounding(c) && c.options.rounding->keeps_rounded;
}
bool where_keeping_all_rounded(const Compilation& c) {
  return where_keeping_rounded(c) && c.options.rounding->keeps_all_rounded;
}
bool where_split(const Compilation& c) {
  return in_training(c) && c.options.split_weights;
}
bool where_stashing(const Compilation& c) {
  return in_training(c) && c.options.stash.has_value();
}
bool where_activations_fuse(const Compilation& c) {
  return c.options.fuse_activations;
}

/// Replaces each program there is by change(program, values that outlive its runs).
template <typename Change>
void change_all(Compiled& programs, const Change& change) {
  programs.forward = change(programs.forward, programs.saved);
  if (programs.backward)
    programs.backward->program = change(programs.backward->program, programs.kept);
  if (programs.weights)
    programs.weights->derived.program =
        change(programs.weights->derived.program, std::vector<ValueId>());
}

void list_saved(Compiled& programs) {
  programs.saved.clear();
  for (const Link& link : programs.backward->saved) programs.saved.push_back(link.forward);
}

/// Products in FP8 leave what they read of tokens to the gradients of weights alone: where these
/// read what was not rounded, or quantize it themselves, it is never permuted before them.
bool gathers_for_fp8(const Compilation& c) {
  if (!c.options.rounding || c.backend.is_host()) return false;
  const OperandRounding& rounding = *c.options.rounding;
  const Recipe& recipe = *rounding.recipe;
  const bool gather = rounding.plain_weight_gradients ||
                      has_fp8_wgrad(recipe.token_gradient, recipe.token_activation);
  return !recipe.is_f16 && rounding.fp8_products && !rounding.keeps_rounded && gather &&
         has_fp8_product(recipe.activation, recipe.weight);
}

/// Otherwise rows are rounded where they stand.
GatherFusion forward_gathers(const Compilation& c) {
  if (!c.options.rounding) return c.options.gathers;
  const bool never = c.options.gathers == GatherFusion::kNever;
  return gathers_for_fp8(c) && !never ? GatherFusion::kAlways : GatherFusion::kNever;
}

GatherFusion gradient_gathers(const Compilation& c) {
  return !c.options.rounding || gathers_for_fp8(c) ? c.options.gathers : GatherFusion::kNever;
}

void fuse_forward_sums(Compilation& c) {
  c.programs.forward = fuse_sums(c.programs.forward);
}

void join_blocks(Compilation& c) {
  c.programs.forward = join_expert_blocks(c.programs.forward);
}

void fuse_forward_gathers(Compilation& c) {
  GatherUse use{.differentiated = c.goal == Goal::kTrain};
  if (use.differentiated) {
    use.made_again = [&](ValueId id) {
      return is_dropped(c.programs.forward, id, c.options.recompute);
    };
  }
  c.programs.forward = fuse_gathers(c.programs.forward, forward_gathers(c), c.backend, use);
}

void derive_backward(Compilation& c) {
  c.programs.backward = differentiate(c.programs.forward, c.options.gradients);
  list_saved(c.programs);
}

void round_products(Compilation& c) {
  Compiled& programs = c.programs;
  OperandRounding rounding = *c.options.rounding;
  rounding.fp8_products = rounding.fp8_products && !c.backend.is_host();
  rounding.keeps_copies = rounding.keeps_copies && in_training(c);
  // Scales of earlier steps are a training's.
  if (!in_training(c)) rounding.recipe = &at_hand(*rounding.recipe);
  WeightCopies& copies = programs.weight_copies;
  std::optional<Backward> backward;
  if (programs.backward)
    backward = round_operands(programs.forward, *programs.backward, rounding, copies);
  programs.forward = round_operands(programs.forward, rounding, copies);
  programs.backward = std::move(backward);
}

void keep_rounded_values(Compilation& c) {
  Compiled& programs = c.programs;
  programs.backward = keep_quantized(programs.forward, *programs.backward);
  list_saved(programs);
}

void quantize_saved_values(Compilation& c) {
  quantize_saved(c.programs.forward, *c.programs.backward);
  list_saved(c.programs);
}

void permute_saved_again(Compilation& c) {
  c.programs.backward = permute_again(c.programs.forward, *c.programs.backward);
  list_saved(c.programs);
}

void quantize_before_moving(Compilation& c) {
  change_all(c.programs, [](const Program& program, const std::vector<ValueId>& kept) {
    return quantize_early(program, kept);
  });
}

void fuse_gradient_sums(Compilation& c) {
  Program& backward = c.programs.backward->program;
  backward = fuse_sums(backward);
  c.programs.model_flops = c.programs.forward.cost().flops + backward.cost().flops;
}

void recompute_values(Compilation& c) {
  Compiled& programs = c.programs;
  const auto dropped = choose_dropped(programs.forward, *programs.backward, c.options.recompute);
  if (dropped.empty()) return;
  programs.backward = recompute(programs.forward, *programs.backward, dropped);
  list_saved(programs);
}

void fuse_gradient_gathers(Compilation& c) {
  Program& backward = c.programs.backward->program;
  backward = fuse_gathers(backward, gradient_gathers(c), c.backend, {});
}

void split_off_weights(Compilation& c) {
  SplitBackward parts = split_weights(*c.programs.backward);
  c.programs.kept = parts.kept_intermediates();
  c.programs.backward = std::move(parts.input);
  c.programs.weights = {std::move(parts.weight), std::move(parts.kept)};
}

void fuse_activations(Compilation& c) {
  change_all(c.programs, [](const Program& program, const std::vector<ValueId>& kept) {
    return fuse_producers(program, kept);
  });
}

void join_repeats(Compilation& c) {
  change_all(c.programs, [](const Program& program, const std::vector<ValueId>& /*kept*/) {
    return fuse_repeats(program);
  });
}

void quantize_at_hand(Compilation& c) {
  change_all(c.programs, [](const Program& program, const std::vector<ValueId>& /*kept*/) {
    return fuse_quantize(program);
  });
}

void join_small_products(Compilation& c) {
  change_all(c.programs, [](const Program& program, const std::vector<ValueId>& kept) {
    return join_products(program, kept);
  });
}

void order_nodes(Compilation& c) {
  const ScheduleOptions options{
      .memory_growth = 0.1,
      .workspace = [&](const Operator& op, std::span<const ValueType> inputs) {
        return c.backend.workspace_bytes(op, inputs);
      }};
  change_all(c.programs, [&](const Program& program, const std::vector<ValueId>& kept) {
    return schedule(program, kept, options);
  });
}

void set_nodes_aside(Compilation& c) {
  change_all(c.programs, [&](const Program& program, const std::vector<ValueId>& /*kept*/) {
    return set_aside(program, c.backend);
  });
}

bool is_named(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::any_of(names,
                             [&](const std::string& one) { return one == "all" || one == name; });
}

/// What is offloaded waits in the host's memory.
void stash_saved_rows(Compilation& c) {
  Compiled& programs = c.programs;
  const Program& forward = programs.forward;
  const RowPlan rows(forward, plan_memory(forward, programs.saved),
                     find_tellers(forward, c.backend), {});
  std::vector<ValueId> stashed = choose_stashed(forward, programs.saved, rows, *c.options.stash);
  std::erase_if(stashed,
                [&](ValueId id) { return is_named(c.options.offload, forward.value(id).name); });
  stash_rows(programs.forward, *programs.backward, stashed, *c.options.stash);
  list_saved(programs);
}

constexpr Pass kPasses[] = {
    {"fuse_sums", "operators add to their result what a sum would", always, fuse_forward_sums},
    {"join_expert_blocks", "block-sparse products of equal experts become grouped ones", on_devices,
     join_blocks},
    {"fuse_gathers", "readers gather rows themselves, no copy is made or kept", always,
     fuse_forward_gathers},
    {"differentiate", "derives the backward program", in_training, derive_backward},
    {"round_operands", "products read numbers of few bits", where_rounding, round_products},
    {"keep_quantized", "what products read of tokens is kept as it was quantized",
     where_keeping_rounded, keep_rounded_values},
    {"quantize_saved", "what activations' gradients read is kept quantized",
     where_keeping_all_rounded, quantize_saved_values},
    {"quantize_early", "rows are quantized before they are exchanged or permuted", where_rounding,
     quantize_before_moving},
    {"permute_again", "rows of FP8 are permuted again instead of kept, where that is less",
     where_keeping_all_rounded, permute_saved_again},
    {"fuse_gradient_sums", "fuse_sums for gradients", in_training, fuse_gradient_sums},
    {"recompute", "values are computed again instead of kept", where_recomputing, recompute_values},
    {"fuse_gradient_gathers", "fuse_gathers for gradients and recomputed rows", in_training,
     fuse_gradient_gathers},
    {"split_weights", "weight gradients get a program of their own", where_split,
     split_off_weights},
    {"fuse_producers", "activations become part of the products around them",
     where_activations_fuse, fuse_activations},
    {"fuse_repeats", "nodes also give what others compute of the same values", in_training,
     join_repeats},
    {"fuse_quantize", "what has values at hand quantizes them", where_rounding_on_devices,
     quantize_at_hand},
    {"join_products", "small products of the same rows, or of one sum, become one", on_devices,
     join_small_products},
    {"schedule", "exchanges begin early, computation hides them", in_training, order_nodes},
    {"stash_rows", "rows that the device alone counts wait in pages of a pool", where_stashing,
     stash_saved_rows},
    {"set_aside", "weight gradients that leave most of a GPU idle run beside what follows",
     where_side_lane, set_nodes_aside},
};

ProgramFigures measure(const Program& program, const std::vector<ValueId>& saved,
                       const Backend& backend) {
  const MemoryPlan plan =
      plan_memory(program, saved, [&](const Operator& op, std::span<const ValueType> inputs) {
        return backend.workspace_bytes(op, inputs);
      });
  return {.num_nodes = std::ssize(program.nodes()),
          .saved_bytes = plan.saved_bytes,
          .transient_bytes = plan.transient_bytes};
}

PassEffect measure(std::string_view pass, std::string_view what, const Compilation& c) {
  const Compiled& programs = c.programs;
  PassEffect effect{.pass = pass,
                    .what = what,
                    .forward = measure(programs.forward, programs.saved, c.backend),
                    .backward = {},
                    .weights = {}};
  if (programs.backward)
    effect.backward = measure(programs.backward->program, programs.kept, c.backend);
  if (programs.weights) effect.weights = measure(programs.weights->derived.program, {}, c.backend);
  return effect;
}

std::vector<ValueId> choose_offloaded(const Compiled& programs,
                                      const std::vector<std::string>& names) {
  std::vector<ValueId> chosen;
  for (const ValueId id : programs.saved) {
    if (!may_wait_elsewhere(programs.forward.type(id))) continue;
    if (is_named(names, programs.forward.value(id).name)) chosen.push_back(id);
  }
  return chosen;
}

void check_options(Goal goal, const CompileOptions& options) {
  if (goal == Goal::kTrain) {
    ensure(!options.gradients.outputs.empty(), "a training program without a gradient given");
    ensure(!options.stash || !options.split_weights,
           "weights' gradients that are split off would read what was stashed a second time");
    return;
  }
  ensure(
      options.gradients.outputs.empty() && options.gradients.inputs.empty() &&
          options.recompute.empty() && options.offload.empty() && !options.split_weights &&
          !options.stash,
      "gradients, recomputation, offloading, stashing and their split are for training, not to {}",
      goal_name(goal));
}

/// `after` is told of each pass that ran, and of the program as built.
template <typename After>
Compiled run_passes(Program forward, Goal goal, const CompileOptions& options,
                    const Backend& backend, const After& after) {
  static constexpr Pass kAsBuilt{.name = "as built", .what = "", .applies = {}, .run = {}};
  check_options(goal, options);
  Compilation c{goal, options, backend, Compiled{.forward = std::move(forward)}};
  after(kAsBuilt, c);
  for (const Pass& pass : kPasses) {
    if (!pass.applies(c)) continue;
    pass.run(c);
    after(pass, c);
  }
  c.programs.offloaded = choose_offloaded(c.programs, options.offload);
  return std::move(c.programs);
}

}  // namespace

std::string_view goal_name(Goal goal) {
  return goal == Goal::kTrain ? "train" : "infer";
}

bool may_wait_elsewhere(const ValueType& type) {
  return type.dtype != DType::kI64;
}

std::span<const Pass> compile_passes() {
  return kPasses;
}

Compiled compile(Program forward, Goal goal, const CompileOptions& options,
                 const Backend& backend) {
  return run_passes(std::move(forward), goal, options, backend,
                    [](const Pass&, const Compilation&) {});
}

CompileReport report_passes(Program forward, Goal goal, const CompileOptions& options,
                            const Backend& backend) {
  CompileReport report{.program = forward.name(), .goal = goal, .effects = {}};
  run_passes(std::move(forward), goal, options, backend,
             [&](const Pass& pass, const Compilation& c) {
               report.effects.push_back(measure(pass.name, pass.what, c));
             });
  return report;
}

}  // namespace tessera
