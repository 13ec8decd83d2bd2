#include "train/state/initial_weights.h"

#include <iostream>
#include <optional>
#include <set>
#include <utility>

#include "core/file/file.h"
#include "core/process/progress.h"
#include "train/state/checkpointing.h"

namespace tessera {
namespace {

/// What a model's shape is told by, and its tokenizer.
std::set<std::string> keys_of_model() {
  ConfigSchema schema;
  ModelConfig model;
  add_model_options(schema, model);
  std::set<std::string> keys = {"data.tokenizer", "data.end_of_document"};
  for (const ResolvedValue& value : schema.resolved()) keys.insert(value.key);
  return keys;
}

std::vector<std::string> describe(const LoadedPrediction& prediction) {
  std::vector<std::string> notes;
  const auto add = [&](int64_t count, std::string_view what) {
    if (count == 0) return;
    notes.push_back(fmt::format("run.init_from: {} of multi-token prediction {}",
                                format_things(count, "layer"), what));
  };
  add(prediction.added, "not in the checkpoint, with fresh weights");
  add(prediction.left_out, "of the checkpoint left out, as model.mtp_layers says");
  return notes;
}

/// The newest checkpoint of a run that began with run.init_from, and has its model.
std::optional<OpenedCheckpoint> open_own(const Settings& settings) {
  const FoundCheckpoint own = find_latest(checkpoint_folder(settings.run.folder));
  if (!own.path) return std::nullopt;
  OpenedCheckpoint opened = open_checkpoint(own.path->string(), Verify::kSizes);
  if (checkpoint_settings(opened.reader).run.init_from != settings.run.init_from)
    return std::nullopt;
  return opened;
}

/// For its configuration alone. A run that continues does so where run.init_from is gone, too.
OpenedCheckpoint open_initial(const Settings& settings) {
  try {
    if (!path_exists(settings.run.init_from)) {
      if (auto own = open_own(settings)) return std::move(*own);
    }
    return open_checkpoint(settings.run.init_from, Verify::kSizes);
  } catch (const UserError& error) {
    user_error("run.init_from: {}", error.what());
  }
}

/// Adapters are the same model with the factor alone that they were trained with.
void require_same_scale(const CheckpointReader& reader, const LoraConfig& own) {
  const LoraConfig found = checkpoint_settings(reader).model.lora;
  if (!own.is_on() || !found.is_on()) return;
  require(own.alpha == found.alpha && own.rank_stabilized == found.rank_stabilized,
          "{} has low-rank adapters of lora.alpha {} and lora.rank_stabilized {}, but these are {} "
          "and {} here, with which the run would begin with another model; set [lora] as that run "
          "has it to train them on, or export and import it, which merges them",
          reader.path().string(), found.alpha, found.rank_stabilized, own.alpha,
          own.rank_stabilized);
}

}  // namespace

void load_initial_model(ConfigSchema& schema, const Settings& settings) {
  require(settings.preset.empty(),
          "model.preset and run.init_from both give a model; leave one of them empty");
  const OpenedCheckpoint opened = open_initial(settings);
  Settings initial = checkpoint_settings(opened.reader);
  const std::set<std::string> of_model = keys_of_model();
  std::string toml;
  for (const ResolvedValue& value : make_schema(initial).resolved()) {
    if (of_model.contains(value.key)) toml += fmt::format("{} = {}\n", value.key, value.value);
  }
  schema.load_preset("run.init_from", toml);
}

void check_trained_indexer(const Settings& settings) {
  const int64_t top_k = settings.model.index.top_k;
  require(top_k == 0 || !settings.run.init_from.empty(),
          "index.top_k is {}, but run.init_from is empty, and nothing trains an indexer of random "
          "weights; set run.init_from to the checkpoint of a model that has one, or leave [index] "
          "out",
          top_k);
}

std::vector<std::string> load_initial_weights(const Settings& settings, ModelState& state,
                                              Communicator& world) {
  if (settings.run.init_from.empty()) {
    const int64_t rank = settings.model.lora.rank;
    require(rank == 0,
            "lora.rank is {}, but run.init_from is empty, and adapters of random weights would not "
            "be of use; set run.init_from to the checkpoint of a trained model",
            rank);
    state.initialize(static_cast<uint64_t>(settings.run.seed));
    return {};
  }
  try {
    const OpenedCheckpoint opened = open_checkpoint(settings.run.init_from, world);
    require_same_scale(opened.reader, settings.model.lora);
    auto notes =
        describe(state.load_weights(opened.reader, static_cast<uint64_t>(settings.run.seed)));
    const std::string skipped = describe_skipped(opened.skipped, opened.reader.path());
    if (skipped.empty()) return notes;
    notes.push_back("run.init_from: " + skipped);
    // As all commands tell it, wherever standard output goes.
    if (world.rank() == 0) std::cerr << "tessera: note: " << notes.back() << "\n";
    return notes;
  } catch (const UserError& error) {
    user_error("run.init_from: {}", error.what());
  }
}

}  // namespace tessera
