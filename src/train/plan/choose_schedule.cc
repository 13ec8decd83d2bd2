#include "train/plan/choose_schedule.h"

#include <array>
#include <limits>

#include "runtime/cuda/cuda_backend.h"
#include "train/memory/choose_policy.h"
#include "train/setup/device_choice.h"
#include "train/setup/step_schedule.h"

namespace tessera {
namespace {

/// Of a step: by less than this, passes stay as they are built.
constexpr double kLeastGain = 0.01;

/// GPUs of one family differ by memory and by links between them.
std::string hardware_of_gpu(const std::string& device) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kKnown = {
      {{"GB200", "gb200-nvl72"}, {"H200", "h200-ib"}, {"H800", "h800-ib"}, {"H100", "h100-ib"}}};
  for (const auto& [part, name] : kKnown) {
    if (device.find(part) != std::string::npos) return std::string(name);
  }
  return "h100-ib";
}

/// Nothing where train.hardware leaves it open on a host.
std::optional<Hardware> find_hardware(const Settings& settings, const Backend& backend) {
  if (settings.train.hardware != kDeviceHardware) return load_hardware(settings.train.hardware);
  if (backend.is_host()) return std::nullopt;
  const GpuList list = list_gpus();
  return load_hardware(hardware_of_gpu(list.gpus.empty() ? "" : list.gpus.front().name));
}

bool may_choose_memory(const TrainSettings& train) {
  return train.recompute.empty() && train.offload.empty() && !train.stashes() &&
         train.memory_limit != "none";
}

/// Simulates steps of either schedule.
class Chooser {
 public:
  Chooser(const Settings& settings, int64_t num_ranks, const Hardware& hardware)
      : settings_(settings), num_ranks_(num_ranks), work_(hardware), flops_(flops_of(settings)) {}

  ScheduleChoice run() {
    ScheduleChoice choice{.schedule = std::string(kAsBuilt), .hardware = work_.hardware().name};
    choice.as_built_seconds = simulate(std::string(kAsBuilt)).step.seconds;
    choice.merged_seconds = std::numeric_limits<double>::infinity();
    try {
      const PlannedLayout merged = simulate("merged");
      if (merged.fits) {
        choice.merged_seconds = merged.step.seconds;
      } else {
        choice.why = "merged passes do not fit the memory";
      }
    } catch (const UserError& error) {
      choice.why = error.what();
    }
    if (choice.merged_seconds < (1 - kLeastGain) * choice.as_built_seconds)
      choice.schedule = "merged";
    return choice;
  }

 private:
  PlannedLayout simulate(std::string schedule) const {
    Settings settings = settings_;
    settings.train.schedule = std::move(schedule);
    validate_without_data(settings);
    return plan_layout(settings, num_ranks_, work_, flops_, may_choose_memory(settings.train));
  }

  const Settings& settings_;
  int64_t num_ranks_;
  StepWork work_;
  double flops_;
};

}  // namespace

ScheduleChoice choose_schedule(const Settings& settings, int64_t num_ranks,
                               const Hardware& hardware) {
  return Chooser(settings, num_ranks, hardware).run();
}

std::optional<ScheduleChoice> choose_schedule(const Settings& settings, int64_t num_ranks,
                                              const Backend& backend) {
  if (step_schedule(settings.train) != StepSchedule::kAuto) return std::nullopt;
  ScheduleChoice as_built{.schedule = std::string(kAsBuilt)};
  const std::optional<Hardware> hardware = find_hardware(settings, backend);
  if (num_ranks == 1) {
    as_built.why = "one rank waits for nobody";
    return as_built;
  }
  if (!hardware) {
    as_built.why = "ranks on CPUs share them; train.hardware may name what to simulate";
    return as_built;
  }
  require(
      hardware->on_host == backend.is_host(),
      "train.hardware is \"{}\", which has {}, but this run computes on {}; name other hardware",
      hardware->name, hardware->on_host ? "processors alone" : "GPUs",
      backend.is_host() ? "the CPU" : "a GPU");
  Settings planned = settings;
  planned.run.device = backend.is_host() ? DeviceChoice::kCpu : DeviceChoice::kCuda;
  return choose_schedule(planned, num_ranks, *hardware);
}

std::optional<ScheduleChoice> apply_schedule(Settings& settings, int64_t num_ranks,
                                             const Backend& backend) {
  auto choice = choose_schedule(settings, num_ranks, backend);
  if (choice) settings.train.schedule = choice->schedule;
  return choice;
}

std::optional<ScheduleChoice> apply_schedule(Settings& settings, int64_t num_ranks) {
  if (step_schedule(settings.train) != StepSchedule::kAuto) return std::nullopt;
  return apply_schedule(settings, num_ranks, plan_backend(settings, num_ranks));
}

std::string describe(const ScheduleChoice& choice) {
  std::string text = fmt::format("schedule {}", choice.schedule);
  const auto add = [&](const std::string& more) { text += ", " + more; };
  if (!choice.hardware.empty()) {
    add(fmt::format("simulated on {}: {} a step as built", choice.hardware,
                    format_estimate(choice.as_built_seconds)));
    if (choice.why.empty())
      add(fmt::format("{} with merged passes", format_estimate(choice.merged_seconds)));
  }
  if (!choice.why.empty()) add(choice.why);
  return text;
}

}  // namespace tessera
