#include "train/setup/step_schedule.h"

#include <array>
#include <filesystem>

#include "core/error.h"
#include "core/file/file.h"
#include "core/text/names.h"

namespace tessera {
namespace {

/// Far more than the passes that check_schedule allows.
constexpr int64_t kMostBytes = int64_t{1} << 27;

PipelineOrder read_order(const TrainSettings& train) {
  return parse_pipeline(read_text_file(train.schedule, kMostBytes), train.schedule);
}

}  // namespace

StepSchedule step_schedule(const TrainSettings& train) {
  const std::array<std::string, 3> names = {std::string(kAsBuilt), "merged", "auto"};
  for (size_t i = 0; i < names.size(); ++i) {
    if (train.schedule == names[i]) return static_cast<StepSchedule>(i);
  }
  std::error_code error;
  require(
      std::filesystem::is_regular_file(train.schedule, error),
      "train.schedule: found \"{}\", expected as_built, merged, auto or the path of a file with "
      "every stage's passes{}",
      train.schedule, did_you_mean(train.schedule, names));
  return StepSchedule::kFile;
}

bool merges_passes(const TrainSettings& train) {
  switch (step_schedule(train)) {
    case StepSchedule::kMerged:
      return true;
    case StepSchedule::kFile:
      return merges_passes(read_order(train));
    case StepSchedule::kAsBuilt:
    case StepSchedule::kAuto:
      break;
  }
  return false;
}

PipelineOrder make_order(const TrainSettings& train, const PipelineSpec& spec) {
  if (step_schedule(train) != StepSchedule::kFile) return make_pipeline_schedule(spec);
  PipelineOrder order = read_order(train);
  check_pipeline(spec, order, train.schedule);
  return order;
}

}  // namespace tessera
