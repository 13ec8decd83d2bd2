#include "parallel/pipeline_order.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <tuple>

#include "core/error.h"

namespace tessera {
namespace {

using Steps = std::vector<PipelineStep>;

constexpr std::string_view kBlanks = " \t\r";

/// Where something stands, for messages.
struct Place {
  const std::string& name;
  size_t line = 0;
};

[[noreturn]] void refuse(const Place& place, std::string_view found, std::string_view expected) {
  user_error("{}, line {}: found \"{}\" where {} is expected", place.name, place.line, found,
             expected);
}

/// Takes the first word of a line from it; empty at its end.
std::string_view take_word(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(kBlanks), line.size()));
  const std::string_view word = line.substr(0, line.find_first_of(kBlanks));
  line.remove_prefix(word.size());
  return word;
}

int64_t parse_number(std::string_view text, std::string_view word, const Place& place,
                     std::string_view expected) {
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end || number < 0) refuse(place, word, expected);
  return number;
}

/// "F0.12".
PipelineStep parse_step(std::string_view text, std::string_view word, const Place& place) {
  constexpr std::string_view kExpected = "a pass such as F0.3, B0.3, W0.3 or F0.4|B0.3";
  constexpr std::string_view kLetters = "FBW";
  const size_t letter = text.empty() ? std::string_view::npos : kLetters.find(text.front());
  const size_t dot = text.find('.');
  if (letter == std::string_view::npos || dot == std::string_view::npos)
    refuse(place, word, kExpected);
  return {.pass = static_cast<PipelinePass>(letter),
          .chunk = parse_number(text.substr(1, dot - 1), word, place, kExpected),
          .micro_batch = parse_number(text.substr(dot + 1), word, place, kExpected)};
}

/// One pass, or two that are merged.
void parse_word(std::string_view word, const Place& place, Steps& steps) {
  const size_t bar = word.find('|');
  steps.push_back(parse_step(word.substr(0, bar), word, place));
  if (bar == std::string_view::npos) return;
  steps.back().merged = true;
  steps.push_back(parse_step(word.substr(bar + 1), word, place));
  const bool both = steps[steps.size() - 2].pass == PipelinePass::kForward &&
                    steps.back().pass == PipelinePass::kBackward;
  if (!both) refuse(place, word, "a forward pass and, behind the bar, a backward one");
}

std::string to_string(const PipelineStep& step) {
  constexpr std::string_view kLetters = "FBW";
  return fmt::format("{}{}.{}", kLetters[static_cast<size_t>(step.pass)], step.chunk,
                     step.micro_batch);
}

/// Checks the passes of one stage by themselves.
class StageCheck {
 public:
  StageCheck(const PipelineSpec& spec, const std::string& name, size_t stage)
      : spec_(spec), place_(fmt::format("{}: stage {}", name, stage)) {}

  void run(const Steps& steps) {
    for (size_t i = 0; i < steps.size(); ++i) {
      add(steps[i]);
      if (steps[i].merged) check_merged(steps[i], steps.at(i + 1));
    }
    for (const PipelinePass pass : passes()) {
      for (int64_t chunk = 0; chunk < spec_.num_chunks; ++chunk) {
        const int64_t done = next_[{pass, chunk}];
        require(done == spec_.num_micro_batches, "{} does not have {}; a step has {} micro-batches",
                place_, to_string({.pass = pass, .chunk = chunk, .micro_batch = done}),
                spec_.num_micro_batches);
      }
    }
  }

 private:
  std::vector<PipelinePass> passes() const {
    std::vector<PipelinePass> all = {PipelinePass::kForward, PipelinePass::kBackward};
    if (spec_.split_weights) all.push_back(PipelinePass::kWeight);
    return all;
  }

  void add(const PipelineStep& step) {
    require(
        step.chunk < spec_.num_chunks, "{} has {}, but {} there", place_, to_string(step),
        spec_.num_chunks == 1 ? "one chunk is" : fmt::format("{} chunks are", spec_.num_chunks));
    require(step.micro_batch < spec_.num_micro_batches,
            "{} has {}, but a step has {} micro-batches", place_, to_string(step),
            spec_.num_micro_batches);
    require(step.pass != PipelinePass::kWeight || spec_.split_weights,
            "{} has {}, but weight gradients are not split off; set parallel.split_weights", place_,
            to_string(step));
    int64_t& next = next_[{step.pass, step.chunk}];
    require(step.micro_batch == next,
            "{} has {} where {} of this chunk is next: micro-batches are added up in one order, so "
            "that no schedule changes a bit",
            place_, to_string(step),
            to_string({.pass = step.pass, .chunk = step.chunk, .micro_batch = next}));
    ++next;
    if (step.pass == PipelinePass::kForward) return;
    const PipelineStep needed{.pass = step.pass == PipelinePass::kWeight ? PipelinePass::kBackward
                                                                         : PipelinePass::kForward,
                              .chunk = step.chunk,
                              .micro_batch = step.micro_batch};
    require(next_[{needed.pass, needed.chunk}] > step.micro_batch, "{} has {} before {}", place_,
            to_string(step), to_string(needed));
  }

  void check_merged(const PipelineStep& forward, const PipelineStep& backward) const {
    require(forward.micro_batch != backward.micro_batch,
            "{} merges {} with {}, of which one needs the other", place_, to_string(forward),
            to_string(backward));
  }

  const PipelineSpec& spec_;
  std::string place_;
  std::map<std::pair<PipelinePass, int64_t>, int64_t> next_;  // micro-batch of a chunk's next pass
};

/// What a stage sends, or receives, of the results of one kind of pass: the place in the model of
/// who made it, and the micro-batch.
using Messages = std::vector<std::pair<int64_t, int64_t>>;

/// The pass of the other stage from or to which a message of this kind goes.
int64_t step_to(PipelinePass pass) {
  return pass == PipelinePass::kForward ? 1 : -1;
}

Messages list_messages(const PipelineSpec& spec, const Steps& steps, int64_t stage,
                       PipelinePass pass, bool received) {
  const int64_t last = spec.num_chunks * spec.num_stages - 1;
  Messages messages;
  for (const PipelineStep& step : steps) {
    if (step.pass != pass) continue;
    const int64_t place = step.chunk * spec.num_stages + stage;
    const int64_t from = received ? place - step_to(pass) : place;
    const int64_t to = from + step_to(pass);
    if (std::min(from, to) < 0 || std::max(from, to) > last) continue;
    messages.emplace_back(from, step.micro_batch);
  }
  return messages;
}

void check_messages(const PipelineSpec& spec, const PipelineOrder& order, const std::string& name) {
  if (spec.num_stages == 1) return;
  for (const PipelinePass pass : {PipelinePass::kForward, PipelinePass::kBackward}) {
    for (int64_t stage = 0; stage < spec.num_stages; ++stage) {
      const int64_t peer = (stage + step_to(pass) + spec.num_stages) % spec.num_stages;
      const Messages sent = list_messages(spec, order[stage], stage, pass, /*received=*/false);
      const Messages received = list_messages(spec, order[peer], peer, pass, /*received=*/true);
      const auto [out, in] = std::ranges::mismatch(sent, received);
      if (out == sent.end() && in == received.end()) continue;
      user_error(
          "{}: stage {} sends the results of {}, but stage {} expects those of {} then", name,
          stage,
          to_string(
              {.pass = pass, .chunk = out->first / spec.num_stages, .micro_batch = out->second}),
          peer,
          to_string(
              {.pass = pass, .chunk = in->first / spec.num_stages, .micro_batch = in->second}));
    }
  }
}

}  // namespace

PipelineOrder parse_pipeline(std::string_view text, const std::string& name) {
  PipelineOrder order;
  for (Place place{name, 1}; !text.empty(); ++place.line) {
    const size_t length = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, length);
    text.remove_prefix(std::min(length + 1, text.size()));
    line = line.substr(0, line.find('#'));
    std::string_view word = take_word(line);
    if (word.empty()) continue;
    if (word != "stage") refuse(place, word, "a stage, such as \"stage 0 F0.0 B0.0\",");
    const std::string expected = fmt::format("the number of stage {}", order.size());
    word = take_word(line);
    if (parse_number(word, word, place, expected) != std::ssize(order))
      refuse(place, word, expected);
    Steps& steps = order.emplace_back();
    while (!(word = take_word(line)).empty()) parse_word(word, place, steps);
  }
  return order;
}

void check_pipeline(const PipelineSpec& spec, const PipelineOrder& order, const std::string& name) {
  require(std::ssize(order) == spec.num_stages, "{} has {} stages, but the layout has {}", name,
          order.size(), spec.num_stages);
  for (size_t stage = 0; stage < order.size(); ++stage)
    StageCheck(spec, name, stage).run(order[stage]);
  check_messages(spec, order, name);
  if (const auto stuck = find_stuck(spec, order)) {
    user_error(
        "{}: all stages wait forever, stage {} for what {} needs; another stage has it later", name,
        stuck->stage, to_string(stuck->step));
  }
}

bool merges_passes(const PipelineOrder& order) {
  return std::ranges::any_of(order, [](const Steps& steps) {
    return std::ranges::any_of(steps, [](const PipelineStep& step) { return step.merged; });
  });
}

}  // namespace tessera
