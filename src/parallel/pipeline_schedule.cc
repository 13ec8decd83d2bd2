#include "parallel/pipeline_schedule.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <set>
#include <span>

#include "core/error.h"

namespace tessera {
namespace {

using Steps = std::vector<PipelineStep>;

void check_spec(const PipelineSpec& spec) {
  require(spec.num_stages >= 1, "a pipeline of {} stages: there must be at least 1",
          spec.num_stages);
  require(spec.num_micro_batches >= 1, "a pipeline of {} micro-batches: there must be at least 1",
          spec.num_micro_batches);
  require(spec.num_chunks >= 1, "{} chunks a stage: there must be at least 1", spec.num_chunks);
  require(spec.num_chunks == 1 || spec.kind == PipelineKind::kInterleaved,
          "{} chunks a stage need the interleaved schedule", spec.num_chunks);
  require(!spec.merges_passes || spec.kind != PipelineKind::kGpipe,
          "forward passes are merged with backward ones, which GPipe's schedule keeps apart; take "
          "\"1f1b\" or \"interleaved\"");
  require(!spec.merges_passes || !spec.split_weights,
          "forward passes are merged with backward ones, and weight gradients are split off; only "
          "one of the two is possible");
}

/// Micro-batches that go through one chunk before the next chunk's turn: as many as there are
/// stages. What is left over goes with the first, since a smaller group would leave a stage waiting
/// for a chunk that waits for the stage.
int64_t first_group(const PipelineSpec& spec) {
  if (spec.num_micro_batches < spec.num_stages) return spec.num_micro_batches;
  return spec.num_stages + spec.num_micro_batches % spec.num_stages;
}

/// All passes of one kind in the order of a stage: group by group, and in a group chunk by chunk;
/// backward from the last chunk.
Steps list_passes(const PipelineSpec& spec, PipelinePass pass) {
  Steps steps;
  int64_t last = 0;
  for (int64_t first = 0; first < spec.num_micro_batches; first = last) {
    last = first == 0 ? first_group(spec) : first + spec.num_stages;
    for (int64_t i = 0; i < spec.num_chunks; ++i) {
      const int64_t chunk = pass == PipelinePass::kForward ? i : spec.num_chunks - 1 - i;
      for (int64_t m = first; m < last; ++m) steps.push_back({pass, chunk, m});
    }
  }
  return steps;
}

/// Forward passes before the first backward pass of a stage.
int64_t num_warm_up(const PipelineSpec& spec, int64_t stage) {
  const int64_t all = spec.num_micro_batches * spec.num_chunks;
  const int64_t after = spec.num_stages - stage - 1;
  switch (spec.kind) {
    case PipelineKind::kGpipe:
      return all;
    case PipelineKind::kOneFOneB:
    case PipelineKind::kInterleaved:
      break;
  }
  if (spec.num_chunks == 1) return std::min(spec.merges_passes ? 2 * after + 1 : after, all);
  const int64_t more = spec.merges_passes ? 1 : 0;
  return std::min(2 * after + (spec.num_chunks - 1) * first_group(spec) + more, all);
}

/// Appends backward passes, each followed by the oldest weight gradients of more than `delay`.
class BackwardWriter {
 public:
  BackwardWriter(bool split, int64_t delay, Steps& steps)
      : split_(split), delay_(delay), steps_(steps) {}

  void add(const PipelineStep& backward) {
    steps_.push_back(backward);
    if (!split_) return;
    delayed_.push_back({PipelinePass::kWeight, backward.chunk, backward.micro_batch});
    if (static_cast<int64_t>(delayed_.size()) > delay_) flush_one();
  }
  void finish() {
    while (!delayed_.empty()) flush_one();
  }

 private:
  void flush_one() {
    steps_.push_back(delayed_.front());
    delayed_.pop_front();
  }

  bool split_;
  int64_t delay_;
  Steps& steps_;
  std::deque<PipelineStep> delayed_;
};

Steps schedule_stage(const PipelineSpec& spec, int64_t stage) {
  const Steps forward = list_passes(spec, PipelinePass::kForward);
  const Steps backward = list_passes(spec, PipelinePass::kBackward);
  Steps steps;
  // Later stages wait longer at the end, which is what they keep weight gradients for.
  BackwardWriter writer(spec.split_weights, stage, steps);
  size_t next_forward = 0;
  const size_t warm_up = num_warm_up(spec, stage);
  while (next_forward < warm_up) steps.push_back(forward[next_forward++]);
  for (const PipelineStep& step : backward) {
    if (next_forward < forward.size()) {
      steps.push_back(forward[next_forward++]);
      steps.back().merged = spec.merges_passes;
    }
    writer.add(step);
  }
  writer.finish();
  return steps;
}

/// The end times of the passes that other passes wait for.
class Dependencies {
 public:
  explicit Dependencies(const PipelineSpec& spec)
      : spec_(spec),
        ends_(2 * spec.num_stages * spec.num_chunks * spec.num_micro_batches, kNever) {}

  static constexpr double kNever = -1;

  /// When a step may begin as far as other stages go; kNever while that is not known.
  double ready(int64_t stage, const PipelineStep& step) const {
    const int64_t place = step.chunk * spec_.num_stages + stage;
    const int64_t last = spec_.num_chunks * spec_.num_stages - 1;
    switch (step.pass) {
      case PipelinePass::kForward:
        return place == 0 ? 0 : end(PipelinePass::kForward, place - 1, step.micro_batch);
      case PipelinePass::kBackward:
        return place == last ? end(PipelinePass::kForward, place, step.micro_batch)
                             : end(PipelinePass::kBackward, place + 1, step.micro_batch);
      case PipelinePass::kWeight:
        break;
    }
    return end(PipelinePass::kBackward, place, step.micro_batch);
  }

  void set_end(int64_t stage, const PipelineStep& step, double time) {
    if (step.pass == PipelinePass::kWeight) return;
    ends_[index(step.pass, step.chunk * spec_.num_stages + stage, step.micro_batch)] = time;
  }

 private:
  size_t index(PipelinePass pass, int64_t place, int64_t micro_batch) const {
    const int64_t passes = spec_.num_stages * spec_.num_chunks * spec_.num_micro_batches;
    return static_cast<size_t>((pass == PipelinePass::kForward ? 0 : passes) +
                               place * spec_.num_micro_batches + micro_batch);
  }
  double end(PipelinePass pass, int64_t place, int64_t micro_batch) const {
    return ends_[index(pass, place, micro_batch)];
  }

  const PipelineSpec& spec_;
  std::vector<double> ends_;
};

double duration(const PipelineSpec& spec, const PassTimes& times, PipelinePass pass) {
  if (pass == PipelinePass::kForward) return times.forward;
  if (pass == PipelinePass::kWeight) return times.weight;
  return spec.split_weights ? times.backward : times.backward + times.weight;
}

int64_t count_in_flight(const PipelineSpec& spec, const Steps& steps) {
  const PipelinePass last = spec.split_weights ? PipelinePass::kWeight : PipelinePass::kBackward;
  int64_t held = 0;
  int64_t most = 0;
  for (const PipelineStep& step : steps) {
    if (step.pass == PipelinePass::kForward) most = std::max(most, ++held);
    if (step.pass == last) --held;
  }
  return most;
}

void summarize(const PipelineSpec& spec, const std::vector<Steps>& schedule,
               PipelineTimeline& timeline) {
  double busy = 0;
  for (const auto& stage : timeline.stages) {
    for (const TimedStep& step : stage) {
      busy += step.end - step.begin;
      timeline.length = std::max(timeline.length, step.end);
    }
  }
  const double total = timeline.length * static_cast<double>(spec.num_stages);
  timeline.bubble = total > 0 ? 1 - busy / total : 0;
  for (const Steps& steps : schedule)
    timeline.most_in_flight.push_back(count_in_flight(spec, steps));
}

constexpr std::string_view kPassLegend = "F forward, B backward, W weight gradients";

char pass_letter(PipelinePass pass) {
  return pass == PipelinePass::kForward ? 'F' : pass == PipelinePass::kBackward ? 'B' : 'W';
}

size_t column(double time, double scale) {
  return std::lround(time * scale);
}

std::string draw_stage(const std::vector<TimedStep>& steps, double scale, size_t width) {
  std::string row(width, '.');
  for (const TimedStep& timed : steps) {
    const auto begin = column(timed.begin, scale);
    const auto end = std::min(column(timed.end, scale), width);
    for (size_t at = begin; at < end; ++at) {
      const auto digit = static_cast<char>('0' + timed.step.micro_batch % 10);
      row[at] = at == begin ? pass_letter(timed.step.pass) : at == begin + 1 ? digit : '-';
    }
  }
  return row;
}

}  // namespace

std::vector<std::vector<PipelineStep>> make_pipeline_schedule(const PipelineSpec& spec) {
  check_spec(spec);
  std::vector<Steps> schedule;
  for (int64_t stage = 0; stage < spec.num_stages; ++stage)
    schedule.push_back(schedule_stage(spec, stage));
  return schedule;
}

std::vector<bool> find_last_passes(const std::vector<PipelineStep>& steps) {
  std::set<std::pair<int64_t, int64_t>> seen;
  std::vector<bool> last(steps.size());
  for (size_t i = steps.size(); i-- > 0;)
    last[i] = seen.emplace(steps[i].chunk, steps[i].micro_batch).second;
  return last;
}

std::vector<int64_t> count_in_flight(const std::vector<PipelineStep>& steps, int64_t num_chunks) {
  std::vector<int64_t> now(num_chunks, 0);
  std::vector<int64_t> most(now.size(), 0);
  const std::vector<bool> last = find_last_passes(steps);
  for (size_t i = 0; i < steps.size(); ++i) {
    const size_t chunk = steps[i].chunk;
    if (steps[i].pass == PipelinePass::kForward) most[chunk] = std::max(most[chunk], ++now[chunk]);
    if (last[i]) --now[chunk];
  }
  return most;
}

namespace {

/// Runs every stage as far as it comes.
PipelineTimeline run_stages(const PipelineSpec& spec, const std::vector<Steps>& schedule,
                            const PassTimes& times) {
  Dependencies dependencies(spec);
  PipelineTimeline timeline;
  timeline.stages.resize(schedule.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t stage = 0; stage < schedule.size(); ++stage) {
      auto& done = timeline.stages[stage];
      while (done.size() < schedule[stage].size()) {
        const size_t count = schedule[stage][done.size()].merged ? 2 : 1;
        const auto together = std::span(schedule[stage]).subspan(done.size(), count);
        double begin = done.empty() ? 0 : done.back().end;
        double seconds = 0;
        bool waits = false;
        for (const PipelineStep& step : together) {
          const double ready = dependencies.ready(static_cast<int64_t>(stage), step);
          waits = waits || ready == Dependencies::kNever;
          begin = std::max(begin, ready);
          seconds += duration(spec, times, step.pass);
        }
        if (waits) break;
        const double end = begin + seconds;
        for (const PipelineStep& step : together) {
          const double own = duration(spec, times, step.pass);
          done.push_back({step, begin, begin + own});
          begin += own;
          dependencies.set_end(static_cast<int64_t>(stage), step, end);
        }
        moved = true;
      }
    }
  }
  return timeline;
}

/// The first stage that has not come to its end, and where it stands.
std::optional<StuckStage> first_stuck(const PipelineTimeline& timeline,
                                      const std::vector<Steps>& schedule) {
  for (size_t stage = 0; stage < schedule.size(); ++stage) {
    const size_t done = timeline.stages[stage].size();
    if (done < schedule[stage].size())
      return StuckStage{static_cast<int64_t>(stage), schedule[stage][done]};
  }
  return std::nullopt;
}

}  // namespace

std::optional<StuckStage> find_stuck(const PipelineSpec& spec, const std::vector<Steps>& schedule) {
  return first_stuck(run_stages(spec, schedule, {}), schedule);
}

PipelineTimeline simulate_pipeline(const PipelineSpec& spec, const std::vector<Steps>& schedule,
                                   const PassTimes& times) {
  PipelineTimeline timeline = run_stages(spec, schedule, times);
  const auto stuck = first_stuck(timeline, schedule);
  ensure(!stuck, "pipeline stage {} waits forever", stuck ? stuck->stage : 0);
  summarize(spec, schedule, timeline);
  return timeline;
}

std::string list_pipeline(const std::vector<Steps>& schedule) {
  std::string text;
  for (size_t stage = 0; stage < schedule.size(); ++stage) {
    text += fmt::format("stage {:>2}", stage);
    char before = ' ';
    for (const auto& [pass, chunk, micro_batch, merged] : schedule[stage]) {
      text += fmt::format("{}{}{}.{}", before, pass_letter(pass), chunk, micro_batch);
      before = merged ? '|' : ' ';
    }
    text += '\n';
  }
  return text + fmt::format("# {}, with chunk.micro-batch; F|B merged\n", kPassLegend);
}

std::string draw_pipeline(const PipelineTimeline& timeline, int64_t columns) {
  constexpr double kColumnsPerUnit = 3;
  const double scale =
      std::min(kColumnsPerUnit, static_cast<double>(columns) / std::max(timeline.length, 1e-9));
  const auto width = column(timeline.length, scale);
  std::string text;
  for (size_t stage = 0; stage < timeline.stages.size(); ++stage) {
    text += fmt::format("stage {:>2} |{}| {} in flight\n", stage,
                        draw_stage(timeline.stages[stage], scale, width),
                        timeline.most_in_flight[stage]);
  }
  return text + fmt::format(
                    "{}, with the micro-batch's last digit; . waits\n"
                    "{:.1f} % of the time is waited\n",
                    kPassLegend, 100 * timeline.bubble);
}

}  // namespace tessera
