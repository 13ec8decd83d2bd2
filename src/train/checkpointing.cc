#include "train/checkpointing.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "checkpoint/together.h"
#include "core/file.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

Json parse_state(const CheckpointReader& reader) {
  try {
    return Json::parse(reader.state());
  } catch (const Json::exception& error) {
    user_error("checkpoint {}: its state is damaged ({})", reader.path().string(), error.what());
  }
}

int64_t read_count(const CheckpointReader& reader, const Json& state, const char* key) {
  require(state.is_object() && state.contains(key) && state[key].is_number_integer() &&
              state[key].get<int64_t>() >= 0,
          "checkpoint {}: its state has no count '{}'; was it written by `tessera train`?",
          reader.path().string(), key);
  return state[key].get<int64_t>();
}

/// Settings that differ from those of the checkpoint: what follows is then another run than an
/// unbroken one.
std::vector<std::string> compare_configs(const std::string& then, const std::string& now) {
  const auto resolve = [](const std::string& toml) {
    Settings settings;
    ConfigSchema schema = make_schema(settings);
    schema.load_toml_text(toml, "the checkpoint's configuration");
    return schema.resolved();
  };
  std::vector<std::string> notes;
  const auto old_values = resolve(then);
  const auto new_values = resolve(now);
  for (size_t i = 0; i < old_values.size(); ++i) {
    const bool matters = !new_values[i].key.starts_with("run.") || new_values[i].key == "run.seed";
    if (!matters || old_values[i].value == new_values[i].value) continue;
    notes.push_back(fmt::format("{} was {} when the checkpoint was written and is {} now",
                                new_values[i].key, old_values[i].value, new_values[i].value));
  }
  return notes;
}

/// By rank 0, after all have loaded another one.
void set_aside_damaged(const LatestCheckpoint& found, Communicator& world) {
  if (found.damaged.empty()) return;
  together(world, [&] {
    if (world.rank() != 0) return;
    for (const std::filesystem::path& folder : found.damaged) set_aside(folder);
  });
}

/// Whether a user means this one checkpoint, damaged as it may be.
bool names_checkpoint(const std::filesystem::path& path) {
  const std::string name = std::filesystem::absolute(path).lexically_normal().filename().string();
  return path_exists(path / kManifestFile) || parse_step_folder(name).has_value();
}

}  // namespace

std::filesystem::path checkpoint_folder(const std::string& run_folder) {
  return std::filesystem::path(run_folder) / "checkpoints";
}

SaveResult save_run(const Settings& settings, const std::string& config_toml,
                    const ModelState& state, int64_t num_data_tokens, const RunPosition& position,
                    Communicator& world) {
  const Json json = {{"step", position.step},
                     {"tokens_seen", position.tokens_seen},
                     {"skipped_steps", position.skipped_steps},
                     {"num_data_tokens", num_data_tokens},
                     {"config", config_toml}};
  const auto model = state.owned_model();
  const auto optimizer = state.owned_optimizer();
  return save_checkpoint(checkpoint_folder(settings.run.folder),
                         SliceSaveRequest{.step = position.step,
                                          .model = model,
                                          .optimizer = optimizer,
                                          .state = json.dump(),
                                          .keep_last = settings.run.keep_last},
                         world);
}

std::optional<ResumedRun> resume_run(const Settings& settings, const std::string& config_toml,
                                     int64_t num_data_tokens, ModelState& state,
                                     Communicator& world) {
  const std::filesystem::path folder = checkpoint_folder(settings.run.folder);
  LatestCheckpoint found = open_latest(folder, world);
  require(settings.run.resume != ResumeMode::kNever || !found.reader,
          "run.resume = \"never\", but {} holds checkpoints that a new run would mix with; choose "
          "another run.folder or "
          "remove that one",
          folder.string());
  if (!found.reader) {
    require(settings.run.resume != ResumeMode::kRequired,
            "run.resume = \"required\", but {} has no complete checkpoint", folder.string());
    require(!path_exists(folder) || list_step_folders(folder).empty(),
            "{} has checkpoints, but all of them are damaged; remove them to start anew: {}",
            folder.string(), fmt::join(found.ignored, "; "));
    return std::nullopt;
  }
  const CheckpointReader& reader = *found.reader;
  const Json json = parse_state(reader);
  ResumedRun resumed{.position = {}, .path = reader.path(), .notes = {}, .skipped = found.ignored};
  resumed.position = {read_count(reader, json, "step"), read_count(reader, json, "tokens_seen"),
                      read_count(reader, json, "skipped_steps")};
  state.load(reader);
  set_aside_damaged(found, world);
  for (std::string& note : compare_configs(checkpoint_config(reader), config_toml)) {
    resumed.notes.push_back(std::move(note));
  }
  const int64_t num_tokens = read_count(reader, json, "num_data_tokens");
  if (num_tokens != num_data_tokens) {
    resumed.notes.push_back(
        fmt::format("the data had {} tokens when the checkpoint was written and has {} now: steps "
                    "see other tokens",
                    num_tokens, num_data_tokens));
  }
  return resumed;
}

OpenedCheckpoint open_checkpoint(const std::string& path, Communicator& world, Verify verify) {
  require(path_exists(path), "{} does not exist; name a run's folder or a checkpoint", path);
  if (names_checkpoint(path)) return {CheckpointReader(path, world, verify), {}};
  std::vector<std::string> ignored;
  for (const std::filesystem::path& folder :
       {checkpoint_folder(path), std::filesystem::path(path)}) {
    LatestCheckpoint latest = open_latest(folder, world, verify);
    if (latest.reader) return {std::move(*latest.reader), std::move(latest.ignored)};
    ignored.insert(ignored.end(), latest.ignored.begin(), latest.ignored.end());
  }
  user_error("{} holds no complete checkpoint (step-*/ with manifest.json and COMPLETE){}{}", path,
             ignored.empty() ? "" : ": ", fmt::join(ignored, "; "));
}

OpenedCheckpoint open_checkpoint(const std::string& path, Verify verify) {
  return open_checkpoint(path, *make_single_communicator("checkpoint"), verify);
}

std::string describe_skipped(const std::vector<std::string>& skipped,
                             const std::filesystem::path& used) {
  if (skipped.empty()) return "";
  return fmt::format("{} is not the newest checkpoint, but the newest that is whole: {}",
                     used.string(), fmt::join(skipped, "; "));
}

void refuse_nonfinite(const CheckpointReader& reader, std::string_view advice) {
  const NonFiniteTensors& found = reader.nonfinite();
  require(found.empty(), "{}: {}; {}", reader.path().string(),
          found.empty() ? "" : found.describe(), advice);
}

std::string checkpoint_config(const CheckpointReader& reader) {
  const Json state = parse_state(reader);
  require(state.is_object() && state.contains("config") && state["config"].is_string(),
          "checkpoint {}: its state has no configuration; was it written by `tessera train`?",
          reader.path().string());
  return state["config"].get<std::string>();
}

Settings checkpoint_settings(const CheckpointReader& reader) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  schema.load_toml_text(checkpoint_config(reader), reader.path().string() + " (its configuration)");
  const std::filesystem::path carried = reader.path() / settings.data.tokenizer;
  if (!settings.data.tokenizer.empty() && path_exists(carried)) {
    settings.data.tokenizer = carried.string();
  }
  return settings;
}

std::string fresh_state(const std::string& config_toml) {
  const Json json = {{"step", 0},
                     {"tokens_seen", 0},
                     {"skipped_steps", 0},
                     {"num_data_tokens", 0},
                     {"config", config_toml}};
  return json.dump();
}

}  // namespace tessera
