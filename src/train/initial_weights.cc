#include "train/initial_weights.h"

#include "train/checkpointing.h"

namespace tessera {
namespace {

bool is_of_model(const std::string& key) {
  for (const char* section : {"model.", "rope.", "latent.", "moe."}) {
    if (key.starts_with(section) && key != "model.preset") return true;
  }
  return key == "data.tokenizer" || key == "data.end_of_document";
}

}  // namespace

void load_initial_model(ConfigSchema& schema, const Settings& settings) {
  require(settings.preset.empty(),
          "model.preset and run.init_from both give a model; leave one of them empty");
  const CheckpointReader reader(find_checkpoint(settings.run.init_from), Verify::kSizes);
  Settings initial = checkpoint_settings(reader);
  std::string toml;
  for (const ResolvedValue& value : make_schema(initial).resolved()) {
    if (is_of_model(value.key)) toml += fmt::format("{} = {}\n", value.key, value.value);
  }
  schema.load_preset("run.init_from", toml);
}

void load_initial_weights(const Settings& settings, ModelState& state, Communicator& world) {
  try {
    state.load_weights(CheckpointReader(find_checkpoint(settings.run.init_from), world));
  } catch (const UserError& error) {
    user_error("run.init_from: {}", error.what());
  }
}

}  // namespace tessera
