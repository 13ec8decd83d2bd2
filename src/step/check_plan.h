#pragma once

#include <span>

#include "step/step_plan.h"

namespace tessera {

/// Proves of a plan, run from the first task to the last, that every reader comes after its writer,
/// that nothing is overwritten before its last reader, that no exchange's buffers are touched while
/// it is under way, and that every exchange that is started is waited for, once: in the step, or,
/// where the wait stands in front of the start, in the next. Throws InternalError with the tasks.
void check_plan(const StepPlan& plan);

/// Proves of the plans of all ranks, beside that, that the exchanges of each group come in one
/// order on all its members, that messages are received in the order in which they are sent, with
/// the same sizes, and that no rank waits forever, even where a send ends only when it is received.
/// Throws InternalError with the ranks and the tasks.
void check_ranks(std::span<const StepPlan> plans);

}  // namespace tessera
