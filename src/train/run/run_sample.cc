#include "train/run/run_sample.h"

#include "core/memory.h"
#include "train/infer/generate.h"
#include "train/infer/loaded_model.h"
#include "train/setup/machine.h"

namespace tessera {
namespace {

RunSample sample_from(const Trainer& trainer, const Backend& backend, ParameterSet& parameters,
                      std::vector<ExpertState>& experts, const std::function<void()>& alive) {
  const Settings& settings = trainer.settings();
  Generator generator(settings.model, settings.train.dtype(), backend, parameters, experts);
  const GenerateOptions options{.max_tokens = 300, .temperature = 0.8, .top_p = 0.95, .seed = 1};
  const std::string prompt = "The ";
  const Generated generated =
      generator.generate_text(*trainer.data().tokenizer, prompt, options,
                              [&](const GeneratedToken& /*token*/) { alive(); });
  return {prompt, generated.text};
}

/// Ranks share the machine's memory: a sample is not worth more than half of what is left.
void check_sample_memory(const Settings& settings) {
  const auto parameters =
      list_parameters(without_prediction(settings.model), settings.train.dtype());
  const int64_t needed = ParameterSet::count_bytes(parameters, false).weights;
  require(needed <= available_memory() / 2,
          "the whole model takes {}, more than half of the {} left; `tessera generate` writes one",
          format_bytes(needed), format_bytes(available_memory()));
}

}  // namespace

RunSample sample_text(Trainer& trainer, const std::function<void()>& alive) {
  // Weights in FP8 are no generator's: those of the checkpoint are.
  if (trainer.layout().num_ranks() == 1 && !trainer.settings().precision.fp8_weights) {
    return sample_from(trainer, trainer.backend(), trainer.state().parameters(),
                       trainer.state().experts(), alive);
  }
  check_sample_memory(trainer.settings());
  LoadedModel model(trainer.settings().run.folder, DeviceChoice::kCpu);
  return sample_from(trainer, model.backend(), model.parameters(), model.experts(), alive);
}

}  // namespace tessera
