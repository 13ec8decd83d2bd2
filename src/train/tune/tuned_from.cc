#include "train/tune/tuned_from.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/layout.h"
#include "core/file/file.h"
#include "core/file/hash.h"

namespace tessera {
namespace {

constexpr const char* kTunedFromFile = "tuned_from.json";

std::string hash_file(const std::filesystem::path& path) {
  return fmt::format("{:016x}", hash64(read_text_file(path)));
}

std::string hash_in(const nlohmann::json& json, const char* key) {
  return json.contains(key) && json[key].is_string() ? json[key].get<std::string>() : "";
}

/// Nothing where it is not there, or no such file: then nobody knows.
std::optional<TunedFrom> read_tuned_from(const std::filesystem::path& path) {
  if (!path_exists(path)) return std::nullopt;
  const nlohmann::json json = nlohmann::json::parse(read_text_file(path), nullptr, false);
  if (!json.is_object()) return std::nullopt;
  return TunedFrom{.examples = hash_in(json, "examples"), .reference = hash_in(json, "reference")};
}

/// Both known, and others.
bool differ(const std::string& then, const std::string& now) {
  return !then.empty() && !now.empty() && then != now;
}

}  // namespace

std::string hash_examples(const Settings& settings) {
  const bool is_dpo = settings.train.objective == Objective::kDpo;
  const std::string& path = is_dpo ? settings.dpo.pairs : settings.rl.prompts;
  return path.empty() ? "" : hash_file(path);
}

std::string hash_checkpoint(const std::filesystem::path& checkpoint) {
  return checkpoint.empty() ? "" : hash_file(checkpoint / kManifestFile);
}

std::vector<std::string> compare_tuned_from(const Settings& settings, bool continues,
                                            const TunedFrom& now) {
  const std::filesystem::path path = std::filesystem::path(settings.run.folder) / kTunedFromFile;
  const std::optional<TunedFrom> then = continues ? read_tuned_from(path) : std::nullopt;
  const nlohmann::json json = {{"examples", now.examples}, {"reference", now.reference}};
  if (then != now) replace_file(path, json.dump(2) + "\n");
  std::vector<std::string> notes;
  if (!then) return notes;
  if (differ(then->examples, now.examples)) {
    notes.push_back(fmt::format(
        "{} has changed since the run began: steps see other examples",
        settings.train.objective == Objective::kDpo ? settings.dpo.pairs : settings.rl.prompts));
  }
  if (differ(then->reference, now.reference)) {
    notes.push_back(fmt::format(
        "the weights of run.init_from {} are no longer those that the run began with, and the "
        "model is compared with these now; name the checkpoint that it began with, such as "
        "{}/checkpoints/step-00000100, where it is still there",
        settings.run.init_from, settings.run.init_from));
  }
  return notes;
}

void note_tuned_from(TrainingRun& run, const TunedFrom& now) {
  const Trainer& trainer = run.trainer();
  for (const std::string& note :
       compare_tuned_from(trainer.settings(), trainer.position().step > 0, now))
    run.note("note: " + note);
}

}  // namespace tessera
