#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "train/plan/choose_schedule.h"
#include "train/setup/training_data.h"
#include "train/state/load_settings.h"
#include "train/trainer/trainer.h"
#include "train/verify/verify.h"
#include "train/verify/verify_static.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

Json to_json(const Difference& difference) {
  return {{"error", difference.error},
          {"layout", difference.layout},
          {"reference", difference.reference},
          {"index", difference.index}};
}

Json to_json(const Verification& verification) {
  Json parameters = Json::array();
  for (const ParameterDifference& p : verification.parameters) {
    parameters.push_back(
        {{"name", p.name}, {"gradient", to_json(p.gradient)}, {"weight", to_json(p.weight)}});
  }
  Json scalars = Json::array();
  for (const ScalarDifference& scalar : verification.scalars) {
    Json entry = to_json(scalar.difference);
    entry["name"] = scalar.name;
    entry["step"] = scalar.step;
    scalars.push_back(std::move(entry));
  }
  const ParameterDifference* first = verification.first_disagreement();
  return {{"agrees", verification.agrees()},
          {"worst", verification.worst()},
          {"tolerance", verification.tolerances.scalars},
          {"gradient_tolerance", verification.tolerances.gradients},
          {"weight_tolerance", verification.tolerances.weights},
          {"reference_ranks", verification.reference_ranks},
          {"moved_assignments", verification.moved_assignments},
          {"diverged", verification.diverged},
          {"notes", verification.notes},
          {"first_disagreement", first != nullptr ? Json(first->name) : Json()},
          {"parameters", std::move(parameters)},
          {"scalars", std::move(scalars)}};
}

Json to_json(const StaticVerification& verification) {
  Json stages = Json::array();
  for (const StaticVerification::Stage& stage : verification.stages) {
    Json programs = Json::array();
    for (const ProvenProgram& program : stage.programs) {
      Json values = Json::array();
      for (const ValueId id : program.values.ids()) {
        if (!program.values[id].is_known()) continue;
        values.push_back(
            {{"name", program.program.value(id).name}, {"spread", program.describe(id)}});
      }
      programs.push_back({{"program", program.title}, {"values", std::move(values)}});
    }
    stages.push_back({{"first_rank", stage.first_rank},
                      {"axes", stage.axes},
                      {"programs", std::move(programs)}});
  }
  return {{"proven", verification.agrees()},           {"ranks", verification.num_ranks},
          {"checked_ranks", verification.num_checked}, {"faults", verification.faults},
          {"seconds", verification.seconds},           {"stages", std::move(stages)}};
}

int run_static(const Settings& settings, int64_t ranks, const VerifyArguments& arguments,
               std::ostream& out) {
  const StaticVerification verification = verify_static(settings, ranks);
  if (arguments.json) {
    out << to_json(verification).dump(2) << "\n";
  } else {
    out << describe(verification, arguments.all);
  }
  return verification.agrees() ? 0 : 1;
}

/// One rank's memory, of which the comparison needs more.
void check_reference(Settings settings) {
  settings.parallel = {};
  settings.train.schedule = kAsBuilt;
  settings.shard = {};
  settings.run.device = DeviceChoice::kCpu;
  settings.run.cuda_graphs = GraphMode::kAuto;
  settings.train.precision = Precision::kF32;
  settings.precision = {};
  check_sized_model(settings, 1);
}

}  // namespace

int run_verify(const VerifyArguments& arguments, std::ostream& out) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, arguments.config.file, arguments.config.overrides);
  const int64_t ranks =
      arguments.ranks > 0 ? arguments.ranks : least_ranks(settings.parallel.layout);
  settings.model.vocab_size = resolve_vocab_size(settings.model.vocab_size,
                                                 *make_tokenizer(settings.data.tokenizer_spec()));
  apply_schedule(settings, ranks);
  if (arguments.proof) {
    validate(settings.model);
    return run_static(settings, ranks, arguments, out);
  }
  constexpr int64_t kMostSteps = 1000;
  require(arguments.steps <= kMostSteps, "--steps is {}; at most {} are compared", arguments.steps,
          kMostSteps);
  check_as_training(settings, ranks);
  settings = arguments.full ? without_data(std::move(settings))
                            : shrink_for_verification(std::move(settings), ranks);
  check_reference(settings);
  const Verification verification = verify_layout({.settings = std::move(settings),
                                                   .num_ranks = ranks,
                                                   .steps = arguments.steps,
                                                   .tolerance = arguments.tolerance});
  if (arguments.json) {
    out << to_json(verification).dump(2) << "\n";
  } else {
    out << describe(verification, arguments.all);
  }
  return verification.agrees() ? 0 : 1;
}

}  // namespace tessera
