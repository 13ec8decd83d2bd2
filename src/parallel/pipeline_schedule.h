#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// What a pipeline stage does with one micro-batch in one of its model chunks.
enum class PipelinePass : uint8_t {
  kForward,
  kBackward,  ///< all gradients; or the inputs' alone where weight gradients are split off
  kWeight,    ///< the weights' gradients, of which no other stage waits
};

struct PipelineStep {
  PipelinePass pass = PipelinePass::kForward;
  int64_t chunk = 0;  ///< of this stage, in [0, num_chunks)
  int64_t micro_batch = 0;
  /// Of a forward pass: it runs side by side with the backward pass behind it (see PipelineSpec).
  bool merged = false;

  bool operator==(const PipelineStep&) const = default;
};

enum class PipelineKind : uint8_t {
  kGpipe,        ///< all forward passes, then all backward passes (Huang et al., GPipe, 2019)
  kOneFOneB,     ///< one forward, one backward (Narayanan et al., PipeDream, 2019)
  kInterleaved,  ///< the same over several chunks a stage (Narayanan et al., 2021, section 2.2)
};

struct PipelineSpec {
  PipelineKind kind = PipelineKind::kOneFOneB;
  int64_t num_stages = 1;
  int64_t num_chunks = 1;  ///< virtual stages of each stage; above 1 for kInterleaved only
  int64_t num_micro_batches = 1;
  /// Weight gradients apart from the inputs', delayed into what would be idle time (Qi et al.,
  /// "Zero bubble pipeline parallelism", 2023, schedule ZB-H1).
  bool split_weights = false;
  /// After the warm-up each forward pass is merged with the backward pass behind it, so that one
  /// computes while the other's tokens travel. Neither may need the other, so a stage warms up with
  /// one pass more, and, since both end together, with one more for each stage behind it: Megatron
  /// Core's 1F1B with overlapped all-to-all (Zhu et al., section 4.2.3).
  bool merges_passes = false;
};

/// A list of steps for each stage, in the order in which it takes them: a pure function. The chunks
/// of all stages form the model in the order chunk · num_stages + stage. Throws UserError for what
/// cannot be scheduled.
std::vector<std::vector<PipelineStep>> make_pipeline_schedule(const PipelineSpec& spec);

/// Whether each of a stage's steps is the last pass of its micro-batch in its chunk.
std::vector<bool> find_last_passes(const std::vector<PipelineStep>& steps);

/// The most micro-batches of each of a stage's chunks that are in flight at a time, from the
/// forward pass to the last backward one.
std::vector<int64_t> count_in_flight(const std::vector<PipelineStep>& steps, int64_t num_chunks);

/// Durations of a pass of one chunk, in any unit; sending takes no time.
struct PassTimes {
  double forward = 1;
  double backward = 1;  ///< with split weights; both parts together otherwise take it and `weight`
  double weight = 1;
};

/// One of two that are merged has its share of their time.
struct TimedStep {
  PipelineStep step;
  double begin = 0;
  double end = 0;
};

struct PipelineTimeline {
  std::vector<std::vector<TimedStep>> stages;
  double length = 0;
  /// Share of the stages' time in which they wait.
  double bubble = 0;
  /// The most micro-batches' chunks of each stage whose activations are held at a time: from the
  /// forward pass to the end of the weights' gradients.
  std::vector<int64_t> most_in_flight;
};

/// Where a stage waits for what never comes.
struct StuckStage {
  int64_t stage = 0;
  PipelineStep step;
};

/// The first stage that would wait forever; nothing where all come to their end. REQUIRES the
/// passes of `spec`, each once.
std::optional<StuckStage> find_stuck(const PipelineSpec& spec,
                                     const std::vector<std::vector<PipelineStep>>& schedule);

/// Runs a schedule with every step as early as the steps that it needs allow; steps that are merged
/// begin and end together. Throws InternalError for a schedule that would wait forever.
PipelineTimeline simulate_pipeline(const PipelineSpec& spec,
                                   const std::vector<std::vector<PipelineStep>>& schedule,
                                   const PassTimes& times = {});

/// The schedule as text, one row a stage: each step's pass (F, B or W), chunk and micro-batch, such
/// as "F0.12", in the order in which the stage takes them, with a legend behind a "#"; those that
/// are merged are joined by a "|". parse_pipeline reads it.
std::string list_pipeline(const std::vector<std::vector<PipelineStep>>& schedule);

/// The timeline as text, one row a stage, at most `columns` wide: F, B and W with the micro-batch's
/// last digit, and dots where a stage waits, with a legend.
std::string draw_pipeline(const PipelineTimeline& timeline, int64_t columns = 160);

}  // namespace tessera
