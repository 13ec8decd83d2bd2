#pragma once

#include <vector>

#include "program/memory_plan.h"

namespace tessera {

struct ScheduleOptions {
  /// The planned transient memory may exceed that of the given order by this share.
  double memory_growth = 0;
  /// FLOPs in the time in which an exchange moves a byte, as an estimate: 2000 for an H100 over
  /// NVLink, 8000 over a 400 Gb/s network.
  double flops_per_byte = 4000;
  /// Scratch memory of the kernels that will run; empty: the CPU's.
  WorkspaceRule workspace = {};
};

/// An order of the nodes in which exchanges between ranks are started as early as their inputs are
/// ready, and what does not need them stands between their start and their first use:
///
///   1. the next exchange, as soon as it can start;
///   2. else what it needs;
///   3. else, while an exchange is under way, whatever else needs none that is, unless it would
///   hide
///      more than twice as much of a later exchange, which it need not precede;
///   4. else what waits for one, those first that the next exchange needs;
///
/// and the earlier node where there are several. A node that would take the memory in use beyond a
/// limit gives way to the earliest node left. Of the orders for several limits, with and without
/// the patience of 3, it is the one that hides most of the exchanges' time and whose planned memory
/// is allowed; the given order where none hides more. With an allowance of 10%, a layer's backward
/// programs hide two thirds of the exchanged bytes or more, without one often a third or less
/// (bench/schedule_bench.cc).
///
/// A pure function of the program and its kernels' scratch memory. Dependencies, and so the bits,
/// are kept (find_dependencies), and so is the order of the exchanges: ranks whose programs differ
/// in sizes start them in the same order. `saved` are the intermediates that outlive the run and
/// take no transient memory.
std::vector<int> find_schedule(const Program& program, const std::vector<ValueId>& saved,
                               const ScheduleOptions& options = {});

/// The program in that order; values keep their ids.
Program schedule(const Program& program, const std::vector<ValueId>& saved,
                 const ScheduleOptions& options = {});

}  // namespace tessera
