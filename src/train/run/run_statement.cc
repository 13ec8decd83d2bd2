#include "train/run/run_statement.h"

#include <algorithm>
#include <filesystem>

#include "comm/agreement/compared_environment.h"
#include "core/process/build_id.h"
#include "data/file_identity.h"
#include "data/text/text_source.h"
#include "data/token_file.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/setup/blend_settings.h"
#include "train/setup/device_choice.h"
#include "train/setup/step_schedule.h"
#include "train/setup/training_data.h"
#include "train/state/checkpointing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

using Topic = RankStatement::Topic;
using Values = std::map<std::string, std::string>;

Topic state_configuration(const ConfigSchema& schema, const Settings& settings,
                          const std::string& trace) {
  Topic topic{.advice = "start all ranks with the same configuration"};
  for (const ResolvedValue& value : schema.resolved()) topic.values[value.key] = value.value;
  topic.values["--trace"] = trace.empty() ? "not given" : trace;
  // Ranks write into one folder together.
  if (fs::path(settings.run.folder).is_relative())
    topic.values["the folder that run.folder starts from"] = fs::current_path().string();
  return topic;
}

std::vector<fs::path> files_of(const TextSource& source) {
  std::vector<fs::path> paths;
  for (const TextFile& file : list_text_files(source)) paths.push_back(file.path);
  return paths;
}

void state_tokens(Values& values, const std::string& key, const std::string& prefix) {
  const std::string name = token_prefix(prefix);
  const std::vector<fs::path> files = {token_idx_path(name), token_bin_path(name)};
  values[fmt::format("{} ({})", key, prefix)] = identify_files(files);
}

/// The newest name among the run's checkpoints: what ranks would continue from.
std::string newest_checkpoint(const std::string& run_folder) {
  std::string newest = "not there";
  std::error_code error;
  for (fs::directory_iterator entry(checkpoint_folder(run_folder), error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("step-") && (newest == "not there" || name > newest)) newest = name;
  }
  return newest;
}

std::vector<fs::path> files_of_checkpoint(const std::string& path) {
  std::vector<fs::path> files;
  const fs::path folder = open_checkpoint(path, Verify::kSizes).reader.path();
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

void state_data(Topic& topic, const Settings& settings) {
  const DataSettings& data = settings.data;
  Values& values = topic.values;
  values["data.tokenizer (" + data.tokenizer + ")"] = make_tokenizer(data.tokenizer_spec())->name();
  if (!data.text.empty())
    values["data.text (" + data.text + ")"] = identify_files(files_of(make_text_source(data)));
  if (!data.tokens.empty()) state_tokens(values, "data.tokens", data.tokens);
  if (!data.blend.empty()) {
    for (const std::string& prefix : parse_blend(data.blend, data.blend_changes).prefixes)
      state_tokens(values, "data.blend", prefix);
  }
  if (step_schedule(settings.train) == StepSchedule::kFile)
    values["train.schedule (" + settings.train.schedule + ")"] =
        identify_files(std::vector<fs::path>{settings.train.schedule});
  if (!settings.run.init_from.empty())
    values["run.init_from (" + settings.run.init_from + ")"] =
        identify_files(files_of_checkpoint(settings.run.init_from));
  if (settings.run.resume != ResumeMode::kNever)
    values["the newest checkpoint in run.folder (" + settings.run.folder + ")"] =
        newest_checkpoint(settings.run.folder);
}

}  // namespace

RankStatement state_program(const std::string& command, const std::string& version) {
  const std::string build = program_build_id();
  RankStatement statement;
  statement.topics.push_back(
      {.values = {{"the subcommand", command},
                  {"the program", fmt::format("Tessera {}, build {}", version,
                                              build.empty() ? "unknown" : build)}},
       .advice = "start the same program on all ranks"});
  return statement;
}

void state_run(RankStatement& statement, const ConfigSchema& schema, const Settings& settings,
               const std::string& trace) {
  statement.topics.push_back(state_configuration(schema, settings, trace));
  const bool gpus = built_with_cuda() && settings.run.device != DeviceChoice::kCpu;
  statement.topics.push_back({.values = compared_environment(gpus),
                              .advice = "start all ranks with the same environment"});
  if (gpus && settings.run.device == DeviceChoice::kAuto) {
    statement.topics.push_back(
        {.values = {{"what run.device = \"auto\" finds", finds_gpu() ? "a GPU" : "no GPU"}},
         .advice = "set run.device to \"cpu\", or give each rank a GPU and NCCL"});
  }
  Topic data{.advice =
                 "all ranks must find the same: use folders that they share, or equal copies"};
  state_data(data, settings);
  statement.topics.push_back(std::move(data));
}

}  // namespace tessera
