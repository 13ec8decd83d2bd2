#include "train/state/checkpointing.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "checkpoint/together.h"
#include "core/file/file.h"
#include "train/state/load_roundings.h"
#include "train/state/run_paths.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

/// More than any run will ever see, and far enough from 2^63 for sums.
constexpr int64_t kMaxTokens = int64_t{1} << 60;

Json parse_state(const CheckpointReader& reader) {
  try {
    return Json::parse(reader.state());
  } catch (const Json::exception& error) {
    user_error("checkpoint {}: its state is damaged ({})", reader.path().string(), error.what());
  }
}

int64_t read_count(const CheckpointReader& reader, const Json& state, const char* key) {
  const bool found = state.is_object() && state.contains(key);
  const bool valid = found && state[key].is_number_unsigned() &&
                     state[key].get<uint64_t>() <= static_cast<uint64_t>(kMaxTokens);
  require(
      valid,
      "checkpoint {}: its state must have a count '{}' from 0 to {}, found {}; it is damaged, or "
      "was not written by `tessera train`",
      reader.path().string(), key, kMaxTokens, found ? state[key].dump() : "none");
  return state[key].get<int64_t>();
}

/// Where a run's loss scale stood, if it followed the gradients.
std::optional<LossScaleState> read_loss_scale(const CheckpointReader& reader, const Json& state) {
  constexpr const char* kKey = "loss_scale";
  if (!state.contains(kKey)) return std::nullopt;
  const Json& found = state[kKey];
  const bool valid = found.is_object() && found.contains("scale") && found["scale"].is_number() &&
                     is_loss_scale(found["scale"].get<double>());
  require(valid,
          "checkpoint {} is damaged: its state must have a 'loss_scale' with a scale that is a "
          "power of two from 1 to 2^64, found {}",
          reader.path().string(), found.dump());
  return LossScaleState{.scale = found["scale"].get<double>(),
                        .good_steps = read_count(reader, found, "good_steps"),
                        .tolerance = read_count(reader, found, "tolerance")};
}

/// The position, whose numbers must fit each other and the manifest's step.
RunPosition read_position(const CheckpointReader& reader, const Json& state) {
  const RunPosition position{
      read_count(reader, state, "step"), read_count(reader, state, "tokens_seen"),
      read_count(reader, state, "skipped_steps"), read_loss_scale(reader, state)};
  require(position.step == reader.step(),
          "checkpoint {} is damaged: its state is of step {}, its manifest of step {}",
          reader.path().string(), position.step, reader.step());
  require(position.skipped_steps <= position.step && position.tokens_seen >= position.step &&
              (position.step > 0 || position.tokens_seen == 0),
          "checkpoint {} is damaged: at step {} it has seen {} tokens and skipped {} steps",
          reader.path().string(), position.step, position.tokens_seen, position.skipped_steps);
  return position;
}

/// A run that was told to do less than it has done would do nothing and look like success.
void require_steps_left(const CheckpointReader& reader, const Settings& settings) {
  require(reader.step() <= settings.train.steps,
          "{} is after step {}, but train.steps is {}: there is nothing left to train; set "
          "train.steps to more than {} to go on, or choose another run.folder for a new run",
          reader.path().string(), reader.step(), settings.train.steps, reader.step());
}

/// What the user should know where the data is no longer what it was.
std::vector<std::string> compare_data(const Json& state, int64_t tokens_then,
                                      const DataIdentity& now) {
  if (tokens_then != now.num_tokens) {
    return {
        fmt::format("the data had {} tokens when the checkpoint was written and has {} now: steps "
                    "see other tokens",
                    tokens_then, now.num_tokens)};
  }
  const auto then = state.find("data_fingerprint");
  const bool comparable = then != state.end() && then->is_string() && !now.fingerprint.empty();
  if (!comparable || *then == now.fingerprint) return {};
  return {
      fmt::format("the data has changed since the checkpoint was written, though it has {} "
                  "tokens as before: steps see other tokens",
                  tokens_then)};
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
    const std::string& key = new_values[i].key;
    const bool matters =
        !(key.starts_with("run.") || key.starts_with("checkpoint.")) || key == "run.seed";
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

/// Whether run.resume allows what was found; `kept`: a state in the ranks' memory.
void check_found(const Settings& settings, const std::filesystem::path& folder,
                 const LatestCheckpoint& found, bool kept) {
  require(settings.run.resume != ResumeMode::kNever || !found.reader,
          "run.resume = \"never\", but {} holds checkpoints that a new run would mix with; choose "
          "another run.folder or "
          "remove that one",
          folder.string());
  require(settings.run.resume != ResumeMode::kNever || !kept,
          "run.resume = \"never\", but the ranks' memory has a state of the run {}; choose another "
          "run.folder, or remove that one",
          settings.run.folder);
  if (found.reader || kept) return;
  require(settings.run.resume != ResumeMode::kRequired,
          "run.resume = \"required\", but {} has no complete checkpoint", folder.string());
  require(!path_exists(folder) || list_step_folders(folder).empty(),
          "{} has checkpoints, but all of them are damaged; remove them to start anew: {}",
          folder.string(), fmt::join(found.ignored, "; "));
}

std::string describe_kept(const CheckpointReader& kept, const LatestCheckpoint& found) {
  const std::string on_disk =
      found.reader ? fmt::format("the newest whole checkpoint is of step {}", found.reader->step())
                   : "there is no whole checkpoint";
  return fmt::format(
      "the state after step {} comes from the ranks' memory "
      "(checkpoint.peer_copy); {}",
      kept.step(), on_disk);
}

/// What this rank saves of a run.
class RunTensors {
 public:
  explicit RunTensors(const ModelState& state)
      : model_(state.owned_model()), optimizer_(state.owned_optimizer()) {}
  /// Refers to this object.
  SliceSaveRequest request(const SavedRun& run) const {
    return {.step = run.position.step,
            .model = model_,
            .optimizer = optimizer_,
            .state = state_text(run),
            .keep_last = run.keep_last};
  }

 private:
  std::vector<NamedSlice> model_;
  std::vector<NamedSlice> optimizer_;
};

}  // namespace

std::string state_text(const SavedRun& run) {
  Json json = {{"step", run.position.step},
               {"tokens_seen", run.position.tokens_seen},
               {"skipped_steps", run.position.skipped_steps},
               {"num_data_tokens", run.data.num_tokens},
               {"data_fingerprint", run.data.fingerprint},
               {"config", run.config_toml}};
  if (const auto& scale = run.position.loss_scale) {
    json["loss_scale"] = {{"scale", scale->scale},
                          {"good_steps", scale->good_steps},
                          {"tolerance", scale->tolerance}};
  }
  return json.dump();
}

std::filesystem::path checkpoint_folder(const std::string& run_folder) {
  return std::filesystem::path(run_folder) / "checkpoints";
}

SaveResult save_run(const std::string& folder, const SavedRun& run, const ModelState& state,
                    Communicator& world) {
  const RunTensors tensors(state);
  return save_checkpoint(checkpoint_folder(folder), tensors.request(run), world);
}

std::unique_ptr<BackgroundSave> begin_save_run(const std::string& folder, const SavedRun& run,
                                               const ModelState& state, Snapshot& snapshot,
                                               Communicator& world) {
  const RunTensors tensors(state);
  return std::make_unique<BackgroundSave>(checkpoint_folder(folder), tensors.request(run), snapshot,
                                          world);
}

std::optional<ResumedRun> resume_run(const Settings& settings, const std::string& config_toml,
                                     const DataIdentity& data, ModelState& state,
                                     Communicator& world, PeerStore* peers) {
  const std::filesystem::path folder = checkpoint_folder(settings.run.folder);
  LatestCheckpoint found = open_latest(folder, world);
  std::optional<CheckpointReader> kept = peers != nullptr ? peers->find() : std::nullopt;
  if (kept && found.reader && kept->step() <= found.reader->step()) kept.reset();
  check_found(settings, folder, found, kept.has_value());
  if (!found.reader && !kept) return std::nullopt;
  const CheckpointReader& reader = kept ? *kept : *found.reader;
  const Json json = parse_state(reader);
  ResumedRun resumed{.position = read_position(reader, json),
                     .path = reader.path(),
                     .notes = {},
                     .skipped = kept ? std::vector<std::string>() : found.ignored,
                     .from_memory = kept.has_value()};
  const int64_t num_tokens = read_count(reader, json, "num_data_tokens");
  require_steps_left(reader, settings);
  kept ? state.load_held(reader) : state.load(reader);
  set_aside_damaged(found, world);
  if (kept) resumed.notes.push_back(describe_kept(reader, found));
  if (!state.roundings().is_empty() && !has_roundings(reader)) {
    resumed.notes.push_back(
        "the checkpoint does not say how large what is rounded has been, since its recipe did not "
        "ask: the first step is not rounded");
  }
  for (std::string& note : compare_configs(checkpoint_config(reader), config_toml)) {
    resumed.notes.push_back(std::move(note));
  }
  for (std::string& note : compare_data(json, num_tokens, data)) {
    resumed.notes.push_back(std::move(note));
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
  const std::filesystem::path run = run_folder_of(reader.path());
  if (!run.empty()) resolve_data_paths(settings.data, settings.run.folder, run);
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
