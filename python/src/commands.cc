#include "cli/commands.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sstream>

#include "config_box.h"
#include "python.h"

namespace tessera::python {
namespace {

ConfigArguments arguments_of(const ConfigBox& config) {
  ConfigArguments arguments{.file = config.sources().file, .overrides = {}};
  for (const auto& [key, value] : config.sources().overrides)
    arguments.overrides.push_back(fmt::format("--{}={}", key, value));
  return arguments;
}

/// Runs a command that prints JSON.
template <typename Run>
std::string print(const Run& run) {
  std::ostringstream out;
  Turns none;
  compute(none, [&](const SignalMask& masked) { return run(out, masked); });
  return out.str();
}

std::string plan(const ConfigBox& config, const PlanArguments& given) {
  PlanArguments arguments = given;
  arguments.config = arguments_of(config);
  arguments.json = true;
  return print([&](std::ostream& out, const SignalMask& masked) {
    SignalWatch signals;
    arguments.pause = [&] { signals.look(masked); };
    return run_plan(arguments, out);
  });
}

std::string verify(const ConfigBox& config, const VerifyArguments& given) {
  VerifyArguments arguments = given;
  arguments.config = arguments_of(config);
  arguments.json = true;
  return print(
      [&](std::ostream& out, const SignalMask& /*masked*/) { return run_verify(arguments, out); });
}

}  // namespace

void add_commands(nb::module_& module) {
  module.def(
      "plan",
      [](const ConfigBox& config, const std::string& hardware, int64_t gpus, int64_t top,
         bool explain, const std::string& write) {
        return plan(
            config,
            {.hardware = hardware, .gpus = gpus, .top = top, .explain = explain, .write = write});
      },
      nb::arg("config"), nb::kw_only(), nb::arg("hardware"), nb::arg("gpus"), nb::arg("top"),
      nb::arg("explain"), nb::arg("write"));
  module.def(
      "verify",
      [](const ConfigBox& config, int64_t ranks, int64_t steps, bool proof, bool full) {
        return verify(config, {.ranks = ranks, .steps = steps, .full = full, .proof = proof});
      },
      nb::arg("config"), nb::kw_only(), nb::arg("ranks"), nb::arg("steps"), nb::arg("proof"),
      nb::arg("full"));
  module.def(
      "convert",
      [](const std::string& source, const std::string& target, const std::string& to,
         const std::string& like, const std::string& dtype) {
        const ConvertArguments arguments{
            .source = source, .target = target, .to = to, .dtype = dtype, .like = like};
        Turns none;
        const ConvertReport report = compute(none, [&](const SignalMask& masked) {
          SignalWatch signals;
          return convert_model(arguments, [&](std::string_view /*stage*/, int64_t /*done*/,
                                              int64_t /*total*/) { signals.look(masked); });
        });
        return report.notes;
      },
      nb::arg("source"), nb::arg("target"), nb::kw_only(), nb::arg("to"), nb::arg("like"),
      nb::arg("dtype"));
}

}  // namespace tessera::python
