#pragma once

#include <functional>
#include <string>

#include "train/trainer/trainer.h"

namespace tessera {

/// What a trained model goes on with after a prompt.
struct RunSample {
  std::string prompt;
  std::string text;
};

/// A text of the trained model, by rank 0. Of several ranks none has the whole model, so it is read
/// from the run's last checkpoint. `alive` is called with each token. Throws UserError where the
/// machine has no room for it.
RunSample sample_text(Trainer& trainer, const std::function<void()>& alive);

}  // namespace tessera
