#pragma once

#include "model/config/config.h"
#include "parallel/pipeline_schedule.h"

namespace tessera {

// Refusals of sizes with which no run can exist, before anything is made, planned or looped over
// with them. All throw UserError with the sizes and what they come to.

/// A micro-batch: its tokens and the rows that go to experts are numbered in 32 bits, and no
/// machine holds a thousand trillion values. REQUIRES validate(model).
void check_batch(const ModelConfig& model, int64_t num_sequences, int64_t sequence_length);

/// The schedules of all stages, which every rank makes.
void check_schedule(const PipelineSpec& spec);

/// How often a bench repeats what it times, and before that to warm up.
void check_bench_runs(int64_t num_timed, int64_t num_warmup);

/// Predicted bytes against a machine's: what needs more than twice of it can neither fit nor be
/// swapped. `what` takes them, such as "training".
void require_host_memory(int64_t num_bytes, int64_t machine_bytes, std::string_view what);

/// Refuses what a rank is to pin of its machine's memory where there is less; 0: unknown.
void require_pinnable(int64_t num_bytes, int64_t machine_bytes);

}  // namespace tessera
