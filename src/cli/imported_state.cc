#include "cli/imported_state.h"

#include "core/file/file.h"
#include "train/setup/training_data.h"
#include "train/state/checkpointing.h"

namespace tessera {
namespace {

/// A tokenizer among the files that come along, or none.
std::string carried_tokenizer(const std::filesystem::path& source) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    if (path_exists(source / name)) return fmt::format("huggingface/{}", name);
  }
  return "none";
}

}  // namespace

std::string imported_state(const ImportedConfig& config, DType dtype,
                           const std::filesystem::path& source) {
  constexpr int64_t kMostTokens = 2048;
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  settings.model = config.model;
  settings.train.precision = dtype == DType::kBF16 ? Precision::kBF16 : Precision::kF32;
  settings.data.tokenizer = carried_tokenizer(source);
  settings.data.sequence_length = std::min(config.max_length, kMostTokens);
  return fresh_state(schema.to_toml());
}

int64_t resolved_vocab_size(const CheckpointReader& reader) {
  const Settings settings = checkpoint_settings(reader);
  return resolve_vocab_size(settings.model.vocab_size,
                            *make_tokenizer(settings.data.tokenizer_spec()));
}

}  // namespace tessera
