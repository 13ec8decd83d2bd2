#pragma once

#include <string>
#include <vector>

#include "train/setup/settings.h"
#include "train/state/model_state.h"

namespace tessera {

/// Takes the model's shape and the tokenizer from the checkpoint that run.init_from names, where
/// neither a file nor the command line says otherwise. Throws UserError, also where a preset gives
/// another shape.
void load_initial_model(ConfigSchema& schema, const Settings& settings);

/// Refuses a run that would begin with an indexer of random weights, which nothing trains. To
/// compare layouts such weights will do.
void check_trained_indexer(const Settings& settings);

/// Fills a model with the weights of the checkpoint that run.init_from names, or with random ones;
/// the optimizer starts anew. Returns what the user should know: layers of multi-token prediction
/// that only one of the two has. All ranks call. Throws UserError where other tensors of the
/// checkpoint are not those of the model, and for adapters of random weights.
std::vector<std::string> load_initial_weights(const Settings& settings, ModelState& state,
                                              Communicator& world);

}  // namespace tessera
