#include "train/bench/calibrate.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <sstream>
#include <tuple>

#include "core/process/stopwatch.h"
#include "step/build/node_types.h"
#include "train/bench/bench_step.h"
#include "train/setup/device_choice.h"
#include "train/setup/machine.h"
#include "train/state/load_settings.h"

namespace tessera {
namespace {

constexpr double kMicro = 1e-6;
constexpr double kGiga = 1e9;

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

/// Times of calls that do the same: the median on a GPU. The host's calls are now and then
/// interrupted, in a step as well, which is long enough to have its share of that: the mean.
class SampleTable {
 public:
  void add(const KernelSample& sample) {
    seconds_[{sample.name, sample.format, sample.flops, sample.bytes}].push_back(sample.seconds);
  }
  std::vector<std::string> format(bool on_host) {
    std::vector<std::string> lines;
    for (auto& [key, seconds] : seconds_) {
      std::ranges::sort(seconds);
      const auto& [name, format, flops, bytes] = key;
      const double typical = on_host ? mean(seconds) : median_of_sorted(seconds);
      lines.push_back(format_sample({name, format, flops, bytes, typical}));
    }
    return lines;
  }

 private:
  std::map<std::tuple<std::string, std::string, double, double>, std::vector<double>> seconds_;
};

/// What of a step its operators' times do not explain.
struct Residual {
  double operators = 0;  ///< that were run
  double seconds = 0;
};

/// Seconds between operators and beside a step, by least squares, neither below zero.
std::array<double, 2> fit_residuals(const std::vector<Residual>& residuals) {
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const Residual& one : residuals) {
    // Relative errors count: short steps are as important as long ones.
    const double weight = 1 / (one.operators * one.operators);
    n += weight;
    x += weight * one.operators;
    y += weight * one.seconds;
    xx += weight * one.operators * one.operators;
    xy += weight * one.operators * one.seconds;
  }
  const double determinant = n * xx - x * x;
  double gap = determinant > 1e-9 * n * xx ? (n * xy - x * y) / determinant : xy / xx;
  double step = (y - gap * x) / n;
  if (step < 0) {
    step = 0;
    gap = xy / xx;
  }
  if (gap < 0) {
    gap = 0;
    step = std::max(y / n, 0.0);
  }
  return {gap, step};
}

/// GB/s of a copy, read and written together.
double measure_copy_gbs(const Backend& backend) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  constexpr int kCopies = 8;
  Device& device = backend.device();
  const Buffer from(kBytes, "measuring a copy", device);
  const Buffer to(kBytes, "measuring a copy", device);
  device.zero(from.data(), kBytes);
  device.zero(to.data(), kBytes);
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    device.synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int k = 0; k < kCopies; ++k) device.copy(to.data(), from.data(), kBytes);
    device.synchronize();
    best = std::max(best, 2.0 * kCopies * kBytes / seconds_since(start));
  }
  return best / kGiga;
}

/// Rates and sizes that the description lacks.
void measure_rates(Hardware& hardware, const Backend& backend) {
  constexpr double kTera = 1e12;
  if (hardware.f32_tflops == 0)
    hardware.f32_tflops = measure_matrix_peak(backend, DType::kF32) / kTera;
  if (hardware.bf16_tflops == 0)
    hardware.bf16_tflops = measure_matrix_peak(backend, DType::kBF16) / kTera;
  if (hardware.memory_gbs == 0) hardware.memory_gbs = measure_copy_gbs(backend);
  const auto size = [](int64_t bytes) { return fmt::format("{}MiB", bytes >> 20); };
  if (hardware.memory.empty())
    hardware.memory = size(backend.is_host() ? available_memory() : gpu_memory());
  if (hardware.host_memory.empty()) hardware.host_memory = size(available_memory());
  if (hardware.name.empty())
    hardware.name = backend.is_host() ? describe_machine() : backend.device().name();
  if (hardware.source.empty()) hardware.source = "measured by tessera bench --calibrate";
}

Settings settings_of(const CalibrationCase& one, bool on_host) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  std::vector<std::string> overrides = one.overrides;
  overrides.push_back(fmt::format("--run.device={}", on_host ? "cpu" : "cuda"));
  load_settings(schema, settings, "", overrides);
  return settings;
}

class Calibration {
 public:
  void run(const Settings& settings) {
    std::vector<KernelSample> samples;
    const auto observe = [&](const NodeEvent& event) {
      if (event.phase == NodeEvent::Phase::kRun) samples.push_back(sample_of(event));
    };
    const StepBenchResult result =
        bench_step({.settings = settings, .steps = 5, .warmup = 3, .operators = observe});
    double seconds = 0;
    for (KernelSample& sample : samples) {
      constexpr double kShortest = 1e-7;
      sample.seconds = std::max(sample.seconds - result.mark_seconds, kShortest);
      seconds += sample.seconds;
      kernels_.add(sample);
    }
    const auto update = result.operators.find("adamw");
    if (update != result.operators.end()) {
      seconds += update->second;
      update_seconds_ += update->second;
      update_bytes_ += static_cast<double>(result.update_bytes);
    }
    residuals_.push_back({static_cast<double>(samples.size()), result.median() - seconds});
  }

  bool is_empty() const { return residuals_.empty(); }

  /// Puts what was found into the description.
  void finish(Hardware& hardware) {
    // A host runs one operator behind the other: what is left is noise.
    const auto [gap, step] = hardware.on_host ? std::array<double, 2>{} : fit_residuals(residuals_);
    hardware.measured = kernels_.format(hardware.on_host);
    hardware.gap_microseconds = gap / kMicro;
    hardware.step_microseconds = step / kMicro;
    if (update_seconds_ > 0) hardware.update_gbs = update_bytes_ / update_seconds_ / kGiga;
    hardware.like.clear();
    // A rank on a processor copies what it receives itself.
    if (hardware.on_host) hardware.exchange_share = 1;
  }

 private:
  static KernelSample sample_of(const NodeEvent& event) {
    const std::vector<ValueType> inputs = event.program.types(event.node.inputs);
    const Cost cost = event.node.op->cost(inputs, event.program.types(event.node.outputs));
    return {.name = std::string(event.node.op->name()),
            .format = operand_format(inputs),
            .flops = cost.flops,
            .bytes = cost.bytes,
            .seconds = event.seconds()};
  }

  SampleTable kernels_;
  std::vector<Residual> residuals_;
  double update_seconds_ = 0;
  double update_bytes_ = 0;
};

/// A preset and what is other than in it, as overrides without their dashes.
struct CaseText {
  const char* preset;
  const char* overrides;
};

/// A layer or two of published shapes, as whole ranks have them and as ranks of tensor and expert
/// parallelism do; BF16 unless said.
constexpr CaseText kGpuCases[] = {
    {"mixtral-8x7b",
     "model.num_layers=1 train.micro_batch=4 train.global_batch=8 data.sequence_length=4096"},
    {"mixtral-8x7b",
     "model.num_layers=1 train.micro_batch=1 train.global_batch=2 data.sequence_length=4096"},
    {"mixtral-8x7b",
     "model.num_layers=1 model.num_heads=8 model.num_kv_heads=2 model.head_size=128 "
     "moe.inner_size=3584 "
     "train.micro_batch=2 train.global_batch=4 data.sequence_length=4096"},
    {"mixtral-8x22b",
     "model.num_layers=1 moe.num_experts=2 moe.top_k=2 train.micro_batch=2 train.global_batch=2 "
     "data.sequence_length=4096"},
    {"qwen3-30b-a3b",
     "model.num_layers=2 train.micro_batch=4 train.global_batch=8 data.sequence_length=4096"},
    {"qwen3-30b-a3b",
     "model.num_layers=2 train.micro_batch=1 train.global_batch=2 data.sequence_length=4096"},
    {"qwen3-30b-a3b",
     "model.num_layers=1 train.micro_batch=1 train.global_batch=1 data.sequence_length=32768"},
    {"qwen3-30b-a3b",
     "model.num_layers=1 moe.num_experts=16 train.micro_batch=4 train.global_batch=4 "
     "data.sequence_length=4096"},
    {"deepseek-v2-lite",
     "model.num_layers=2 train.micro_batch=4 train.global_batch=4 data.sequence_length=4096"},
    {"deepseek-v3",
     "model.num_layers=2 moe.first_dense_layers=1 moe.num_experts=16 moe.num_groups=1 "
     "moe.top_groups=1 "
     "model.vocab_size=32768 train.micro_batch=1 train.global_batch=2 data.sequence_length=4096"},
    {"deepseek-v3",
     "model.num_layers=2 moe.first_dense_layers=1 moe.num_experts=8 moe.num_groups=1 "
     "moe.top_groups=1 "
     "model.vocab_size=32768 train.micro_batch=2 train.global_batch=2 data.sequence_length=4096"},
    {"qwen2-57b-a14b",
     "model.num_layers=1 train.micro_batch=2 train.global_batch=2 data.sequence_length=4096"},
    {"mixtral-8x7b",
     "model.num_layers=2 moe.num_experts=0 model.inner_size=14336 train.micro_batch=2 "
     "train.global_batch=4 data.sequence_length=4096"},
    {"mixtral-8x7b",
     "model.num_layers=1 moe.num_experts=0 model.hidden_size=8192 model.num_heads=64 "
     "model.num_kv_heads=8 model.inner_size=28672 train.micro_batch=1 train.global_batch=2 "
     "data.sequence_length=8192"},
    {"laptop",
     "train.micro_batch=32 train.global_batch=32 data.sequence_length=256 model.vocab_size=8192"},
    {"megablocks-small",
     "model.num_layers=2 train.micro_batch=32 train.global_batch=32 data.sequence_length=1024"},
    {"mixtral-8x7b",
     "train.precision=fp8 precision.recipe=rowwise "
     "model.num_layers=1 "
     "train.micro_batch=4 train.global_batch=4 data.sequence_length=4096"},
    {"qwen3-30b-a3b",
     "train.precision=fp8 precision.recipe=blockwise precision.weight_gradients=false "
     "model.num_layers=2 train.micro_batch=4 train.global_batch=4 data.sequence_length=4096"},
    {"deepseek-v3",
     "train.precision=fp8 precision.recipe=blockwise precision.weight_gradients=false "
     "model.num_layers=2 moe.first_dense_layers=1 moe.num_experts=8 moe.num_groups=1 "
     "moe.top_groups=1 "
     "model.vocab_size=32768 train.micro_batch=1 train.global_batch=1 data.sequence_length=4096"},
};

/// Both types of activations are timed.
constexpr CaseText kHostCases[] = {
    {"tiny", "train.micro_batch=4 train.global_batch=4 data.sequence_length=64"},
    {"tiny", "train.micro_batch=16 train.global_batch=16 data.sequence_length=256"},
    {"laptop", "train.micro_batch=2 train.global_batch=4 data.sequence_length=128"},
    {"laptop", "train.micro_batch=8 train.global_batch=8 data.sequence_length=256"},
    {"laptop",
     "moe.num_experts=2 model.num_layers=2 train.micro_batch=4 train.global_batch=4 "
     "data.sequence_length=512"},
    {"workstation",
     "model.num_layers=2 train.micro_batch=2 train.global_batch=2 data.sequence_length=512"},
};

CalibrationCase make_case(const CaseText& text, const char* precision) {
  CalibrationCase one{.name = fmt::format("{} {}", text.preset, text.overrides)};
  one.overrides.push_back(fmt::format("--model.preset={}", text.preset));
  std::istringstream words(text.overrides);
  bool says_precision = false;
  for (std::string word; words >> word;) {
    says_precision = says_precision || word.starts_with("train.precision");
    one.overrides.push_back("--" + word);
  }
  if (!says_precision) one.overrides.push_back(fmt::format("--train.precision={}", precision));
  return one;
}

}  // namespace

std::vector<CalibrationCase> calibration_cases(bool on_host) {
  std::vector<CalibrationCase> cases;
  if (on_host) {
    for (const CaseText& text : kHostCases) {
      for (const char* precision : {"f32", "bf16"}) cases.push_back(make_case(text, precision));
    }
    return cases;
  }
  for (const CaseText& text : kGpuCases) cases.push_back(make_case(text, "bf16"));
  return cases;
}

Hardware calibrate(const Hardware& base, const std::vector<CalibrationCase>& cases,
                   const CalibrationProgress& progress) {
  Hardware hardware = base;
  Calibration calibration;
  std::string refusal;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (progress)
      progress(cases[i].name, static_cast<double>(i) / static_cast<double>(cases.size()));
    try {
      const Settings settings = settings_of(cases[i], hardware.on_host);
      if (i == 0) measure_rates(hardware, choose_backend(settings));
      calibration.run(settings);
    } catch (const UserError& error) {  // it does not fit, for one
      refusal = error.what();
    }
  }
  require(!calibration.is_empty(), "nothing could be timed here: {}", refusal);
  calibration.finish(hardware);
  return hardware;
}

}  // namespace tessera
