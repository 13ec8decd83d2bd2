#include "program/compile/print.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/memory.h"

namespace tessera {
namespace {

std::string value_label(const Program& program, ValueId id) {
  return fmt::format("%{}:{}", id, program.value(id).name);
}

std::string list_values(const Program& program, const std::vector<ValueId>& ids) {
  std::vector<std::string> labels;
  for (const ValueId id : ids) labels.push_back(value_label(program, id));
  return fmt::format("{}", fmt::join(labels, ", "));
}

std::string list_results(const Program& program, const Node& node, const MemoryPlan& plan) {
  std::vector<std::string> labels;
  for (const ValueId id : node.outputs) {
    const Storage storage = plan.values[id].storage;
    const std::string_view mark = storage == Storage::kSaved       ? " *"
                                  : storage == Storage::kOffloaded ? " ^"
                                                                   : "";
    const bool added = program.value(id).kind == ValueKind::kAccumulator;
    labels.push_back(fmt::format("{}{} {}{}", added ? "+=" : "", value_label(program, id),
                                 program.type(id).to_string(), mark));
  }
  return fmt::format("{}", fmt::join(labels, ", "));
}

std::string format_flops(double flops) {
  if (flops == 0) return "";
  return flops >= 1e9 ? fmt::format("{:.3g} GFLOP", flops / 1e9)
                      : fmt::format("{:.3g} MFLOP", flops / 1e6);
}

std::string print_bound(const Program& program, ValueKind kind, std::string_view title) {
  std::string text;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    if (program.value(id).kind != kind) continue;
    text +=
        fmt::format("  {} {} {}\n", title, value_label(program, id), program.type(id).to_string());
  }
  return text;
}

std::string print_node(const Program& program, const Node& node, const MemoryPlan& plan,
                       int64_t live) {
  const Cost cost = node.op->cost(program.types(node.inputs), program.types(node.outputs));
  const std::string attributes = node.op->attributes();
  std::string note = format_flops(cost.flops);
  note += fmt::format("{}{} moved, {} live", note.empty() ? "" : ", ",
                      format_bytes(static_cast<int64_t>(cost.bytes)), format_bytes(live));
  return fmt::format("  {} = {}{}({})    # {}\n", list_results(program, node, plan),
                     node.op->name(), attributes.empty() ? "" : "[" + attributes + "]",
                     list_values(program, node.inputs), note);
}

/// The programs of which a report has figures.
struct FigureColumn {
  std::string_view title;
  ProgramFigures PassEffect::*figures;
};

std::vector<FigureColumn> figure_columns(const CompileReport& report) {
  std::vector<FigureColumn> columns;
  for (const FigureColumn& column : {FigureColumn{"forward", &PassEffect::forward},
                                     FigureColumn{"backward", &PassEffect::backward},
                                     FigureColumn{"weights", &PassEffect::weights}}) {
    const auto is_there = [&](const PassEffect& effect) {
      return effect.*column.figures != ProgramFigures();
    };
    if (std::ranges::any_of(report.effects, is_there)) columns.push_back(column);
  }
  return columns;
}

std::string print_figures(const ProgramFigures& figures) {
  if (figures == ProgramFigures()) return fmt::format(" {:>7} {:>11} {:>11}", "-", "-", "-");
  return fmt::format(" {:>7} {:>11} {:>11}", figures.num_nodes, format_bytes(figures.saved_bytes),
                     format_bytes(figures.transient_bytes));
}

}  // namespace

std::string print_passes(const CompileReport& report) {
  const auto columns = figure_columns(report);
  std::string text =
      fmt::format("{:<30}", fmt::format("{} ({})", report.program, goal_name(report.goal)));
  for (const FigureColumn& column : columns) text += fmt::format(" {:>31}", column.title);
  text += fmt::format("\n{:<30}", "");
  for (size_t i = 0; i < columns.size(); ++i)
    text += fmt::format(" {:>7} {:>11} {:>11}", "nodes", "saved", "transient");
  text += "\n";
  for (const PassEffect& effect : report.effects) {
    text += fmt::format("  {:<28}", effect.pass);
    for (const FigureColumn& column : columns) text += print_figures(effect.*column.figures);
    text += effect.what.empty() ? "\n" : fmt::format("  {}\n", effect.what);
  }
  return text;
}

std::vector<int64_t> live_bytes(const Program& program, const MemoryPlan& plan) {
  std::vector<int64_t> live(program.nodes().size());
  const auto add = [&](const Lifetime& lifetime, int64_t num_bytes) {
    for (int node = std::max(lifetime.first, 0); node <= lifetime.last; ++node)
      live[node] += num_bytes;
  };
  const auto workspace_lifetimes = find_workspace_lifetimes(program);
  for (size_t i = 0; i < live.size(); ++i) add(workspace_lifetimes[i], plan.workspace_bytes[i]);
  const auto lifetimes = find_lifetimes(program);
  for (ValueId id = 0; id < program.num_values(); ++id) {
    if (plan.values[id].storage == Storage::kTransient)
      add(lifetimes[id], program.type(id).num_bytes());
  }
  return live;
}

std::string print_program(const Program& program, const std::vector<ValueId>& saved) {
  return print_program(program, plan_memory(program, saved));
}

std::string print_program(const Program& program, const MemoryPlan& plan) {
  const std::vector<int64_t> live = live_bytes(program, plan);
  std::string text = fmt::format("program {} {{\n", program.name());
  text += print_bound(program, ValueKind::kInput, "input ");
  text += print_bound(program, ValueKind::kWeight, "weight");
  text += print_bound(program, ValueKind::kAccumulator, "accum ");
  for (size_t i = 0; i < program.nodes().size(); ++i)
    text += print_node(program, program.nodes()[i], plan, live[i]);
  text += fmt::format("  return {}\n", list_values(program, program.outputs()));
  const Cost cost = program.cost();
  const std::string offloaded =
      plan.offloaded_bytes > 0
          ? fmt::format(" {} offloaded (^),", format_bytes(plan.offloaded_bytes))
          : "";
  text +=
      fmt::format("}}  # {} nodes, {}, {} saved (*),{} {} transient at the peak\n",
                  program.nodes().size(), format_flops(cost.flops), format_bytes(plan.saved_bytes),
                  offloaded, format_bytes(plan.transient_bytes));
  return text;
}

}  // namespace tessera
