#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "core/memory.h"
#include "train/bench_step.h"
#include "train/verify.h"

namespace tessera {
namespace {

void print_operators(const StepBenchResult& result) {
  std::vector<std::pair<double, std::string>> rows;
  double total = 0;
  for (const auto& [name, seconds] : result.operators) {
    rows.emplace_back(seconds, name);
    total += seconds;
  }
  std::ranges::sort(rows, std::greater<>());
  for (const auto& [seconds, name] : rows)
    std::cout << fmt::format("  {:<34} {:>9.2f} ms  {:>5.1f}%\n", name, 1e3 * seconds,
                             100 * seconds / total);
  std::cout << fmt::format("  {:<34} {:>9.2f} ms\n", "(all)", 1e3 * total);
}

nlohmann::json to_json(const StepBenchResult& result) {
  return {{"device", result.device},
          {"seconds", result.seconds},
          {"median_seconds", result.median()},
          {"tokens", result.tokens},
          {"tokens_per_second", static_cast<double>(result.tokens) / result.median()},
          {"flops", result.flops},
          {"tflops", result.flops / result.median() / 1e12},
          {"matrix_peak_tflops", result.matrix_peak / 1e12},
          {"memory_used", result.memory_used},
          {"memory_predicted", result.memory_predicted},
          {"parameters", result.parameters},
          {"operators", result.operators}};
}

}  // namespace

int run_bench(const BenchArguments& arguments) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, arguments.config.file, arguments.config.overrides);
  constexpr int64_t kVocabulary = 32768;
  if (settings.model.vocab_size == 0) settings.model.vocab_size = kVocabulary;
  settings = without_data(std::move(settings));
  TraceRecorder recorder(TraceRecorder::Clock::now());
  const StepBenchResult result =
      bench_step({.settings = settings,
                  .steps = arguments.steps,
                  .warmup = arguments.warmup,
                  .trace = arguments.trace.empty() ? nullptr : &recorder});
  if (!arguments.trace.empty()) {
    const auto world = make_single_world();
    write_trace(recorder, arguments.trace, *world->make_world_group());
  }
  if (arguments.json) {
    std::cout << to_json(result).dump(2) << "\n";
    return 0;
  }
  std::cout << fmt::format(
      "{}, {} parameters in {}\n{:.1f} ms a step (median of {}, {:.1f} to {:.1f}), {} tokens: "
      "{:.0f} "
      "tokens/s, {:.2f} TFLOPS of {:.2f} = {:.1f}% of a large matrix product's\n"
      "memory: {} in use, {} predicted ({:+.2f}%)\n",
      result.device, result.parameters, dtype_name(settings.train.dtype()), 1e3 * result.median(),
      result.seconds.size(), 1e3 * result.seconds.front(), 1e3 * result.seconds.back(),
      result.tokens, static_cast<double>(result.tokens) / result.median(),
      result.flops / result.median() / 1e12, result.matrix_peak / 1e12,
      100 * result.flops / result.median() / result.matrix_peak, format_bytes(result.memory_used),
      format_bytes(result.memory_predicted),
      100.0 *
          (static_cast<double>(result.memory_used) / static_cast<double>(result.memory_predicted) -
           1));
  std::cout << "by operator, in a step in which each is timed:\n";
  print_operators(result);
  return 0;
}

}  // namespace tessera
