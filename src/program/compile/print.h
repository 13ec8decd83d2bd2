#pragma once

#include <string>

#include "program/compile/compile.h"
#include "program/memory_plan.h"

namespace tessera {

/// A readable listing: bound values, one line a node with types, FLOPs and the memory live at it,
/// outputs and the plan's totals. Values that the plan saves are marked with '*'.
std::string print_program(const Program& program, const MemoryPlan& plan);
/// The same with the memory of the CPU's kernels.
std::string print_program(const Program& program, const std::vector<ValueId>& saved = {});

/// A table of what each pass left: nodes, saved and transient bytes of each program.
std::string print_passes(const CompileReport& report);

/// Bytes of transient values and workspace live at each node.
std::vector<int64_t> live_bytes(const Program& program, const MemoryPlan& plan);

}  // namespace tessera
