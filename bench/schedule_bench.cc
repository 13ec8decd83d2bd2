// What the pass `schedule` gives and costs, from the programs of a layer alone: nothing is run and
// no memory taken. For each layout, pass and allowed growth of memory: how many of the exchanges
// have products between their start and their first use, the share of all exchanged bytes that
// these move, and the planned transient memory.
#include <fmt/format.h>

#include <iostream>
#include <string>
#include <vector>

#include "comm/planned_world.h"
#include "core/memory.h"
#include "model/layers/layer_program.h"
#include "program/compile/schedule.h"
#include "program/dependencies.h"
#include "program/differentiate.h"
#include "program/memory_plan.h"

namespace tessera {
namespace {

struct NamedLayout {
  std::string name;
  ParallelSpec parallel;
};

std::vector<NamedLayout> layouts() {
  using enum DispatcherRequest;
  return {
      {"TP4", {.layout = {.tp = 4}}},
      {"EP8", {.layout = {.dp = 8, .ep = 8}, .dispatcher = kAllToAll}},
      {"TP4 EP4", {.layout = {.tp = 4, .ep = 4}, .dispatcher = kAllToAll}},
      {"TP4 EP4, gathered", {.layout = {.tp = 4, .ep = 4}, .dispatcher = kAllGather}},
      {"Ulysses4 EP4",
       {.layout = {.tp = 4, .ep = 4},
        .attention = AttentionParallel::kUlysses,
        .dispatcher = kAllToAll}},
      {"TP2 CP2 ETP2 EP4", {.layout = {.tp = 2, .cp = 2, .dp = 2, .etp = 2, .ep = 4}}},
  };
}

/// Mixtral 8x7B's layer with a shared expert, which has work to hide exchanges with.
ModelConfig bench_model() {
  ModelConfig config;
  config.hidden_size = 4096;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_size = 128;
  config.moe.num_experts = 8;
  config.moe.top_k = 2;
  config.moe.inner_size = 14336;
  config.moe.shared_inner_size = 4096;
  return config;
}

struct Overlap {
  int64_t exchanges = 0;
  int64_t hidden = 0;
  double bytes = 0;
  double hidden_bytes = 0;
};

Cost cost_of(const Program& program, size_t node_idx) {
  const Node& node = program.nodes()[node_idx];
  return node.op->cost(program.types(node.inputs), program.types(node.outputs));
}

Overlap measure(const Program& program) {
  Overlap overlap;
  const std::vector<int> waits = find_waits(program);
  for (size_t i = 0; i < waits.size(); ++i) {
    if (!program.nodes()[i].op->communicates()) continue;
    double flops = 0;
    for (size_t between = i + 1; between < static_cast<size_t>(waits[i]); ++between)
      flops += cost_of(program, between).flops;
    const double bytes = cost_of(program, i).bytes;
    ++overlap.exchanges;
    overlap.bytes += bytes;
    if (flops == 0) continue;
    ++overlap.hidden;
    overlap.hidden_bytes += bytes;
  }
  return overlap;
}

void report(const std::string& layout, const std::string& pass, const Program& program,
            const std::vector<ValueId>& saved) {
  const auto line = [&](const std::string& how, const Program& ordered) {
    const Overlap overlap = measure(ordered);
    std::cout << fmt::format("{:20} {:9} {:9} {:2} of {:2} exchanges, {:5.1f}% of the bytes, {}\n",
                             layout, pass, how, overlap.hidden, overlap.exchanges,
                             100 * overlap.hidden_bytes / overlap.bytes,
                             format_bytes(plan_memory(ordered, saved).transient_bytes));
  };
  line("as built", program);
  for (const double growth : {0.0, 0.1, 0.5})
    line(fmt::format("+{:.0f}%", 100 * growth),
         schedule(program, saved, {.memory_growth = growth}));
}

void run(const NamedLayout& named) {
  const int64_t num_ranks = least_ranks(named.parallel.layout);
  const auto world = make_planned_world(0, num_ranks);
  const StageGroups groups =
      join_stage_groups(*world, Layout(named.parallel.layout, num_ranks), named.parallel);
  const BatchShape shape{.num_tokens = 8192, .sequence_length = 4096, .dtype = DType::kBF16};
  ModelProgram layer = build_layer(bench_model(), {.moe = true}, shape, groups);
  const Backward backward = differentiate(
      layer.forward,
      {{layer.at(Port::kHiddenOut), layer.at(Port::kZLoss), layer.at(Port::kBalanceLoss)},
       {layer.at(Port::kHidden)}});
  std::vector<ValueId> saved;
  for (const Link& link : backward.saved) saved.push_back(link.forward);
  report(named.name, "forward", layer.forward, saved);
  report(named.name, "backward", backward.program, {});
}

}  // namespace
}  // namespace tessera

int main() {
  for (const tessera::NamedLayout& layout : tessera::layouts()) tessera::run(layout);
}
