#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/generate.h"
#include "train/loaded_model.h"

namespace tessera {

/// A configuration as given on the command line.
struct ConfigArguments {
  std::string file;                    ///< TOML; "" for defaults only
  std::vector<std::string> overrides;  ///< "--section.key=value"
};

struct TrainArguments {
  ConfigArguments config;
  bool print_config = false;
  bool json = false;
};

struct GenerateArguments {
  std::string checkpoint;
  std::string prompt;
  GenerateOptions options;
  bool log_probabilities = false;
  bool json = false;
};

struct EvalArguments {
  std::string checkpoint;
  EvaluationRequest request;
  bool json = false;
};

struct InspectArguments {
  ConfigArguments config;
  bool presets = false;
  bool program = false;
  bool memory = false;
  std::string checkpoint;
  std::string report;
  bool json = false;
};

struct DoctorArguments {
  bool json = false;
};

/// Each runs one subcommand and returns the exit code; what the user did wrong is thrown as
/// UserError.
int run_train(const TrainArguments& arguments);
int run_generate(const GenerateArguments& arguments);
int run_eval(const EvalArguments& arguments);
int run_inspect(const InspectArguments& arguments);
int run_doctor(const DoctorArguments& arguments);

/// Every configuration key with its type, default and meaning.
std::string config_help();

}  // namespace tessera
