#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/commands.h"
#include "core/file/file.h"
#include "core/file/output_path.h"
#include "core/memory.h"
#include "core/process/progress.h"
#include "train/bench/bench_layer.h"
#include "train/bench/bench_step.h"
#include "train/bench/calibrate.h"
#include "train/bench/layer_tiles.h"
#include "train/plan/simulated_step.h"
#include "train/setup/device_choice.h"
#include "train/setup/training_data.h"
#include "train/state/load_settings.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

void print_operators(const std::map<std::string, double>& operators) {
  std::vector<std::pair<double, std::string>> rows;
  double total = 0;
  for (const auto& [name, seconds] : operators) {
    rows.emplace_back(seconds, name);
    total += seconds;
  }
  std::ranges::sort(rows, std::greater<>());
  for (const auto& [seconds, name] : rows)
    std::cout << fmt::format("  {:<34} {:>9.2f} ms  {:>5.1f}%\n", name, 1e3 * seconds,
                             100 * seconds / total);
  std::cout << fmt::format("  {:<34} {:>9.2f} ms\n", "(all)", 1e3 * total);
}

nlohmann::json to_json(const LaunchCost& cost) {
  return {{"operators", cost.num_operators},
          {"gpu_operations", cost.num_operations},
          {"host_seconds", cost.seconds},
          {"host_seconds_per_operator", cost.per_operator()}};
}

nlohmann::json to_json(const GpuFeed& feed) {
  nlohmann::json json = {{"one_by_one", to_json(feed.one_by_one)}, {"graphs", nullptr},
                         {"why_no_graph", feed.why_no_graph},      {"host_waits", feed.num_waits},
                         {"host_seconds", feed.host_seconds},      {"idle_share", feed.idle_share}};
  if (feed.graphs) json["graphs"] = to_json(*feed.graphs);
  return json;
}

std::string describe_feed(const GpuFeed& feed) {
  std::string text =
      fmt::format("host: {} operators of a step's programs, {:.2f} us each given one by one",
                  feed.one_by_one.num_operators, 1e6 * feed.one_by_one.per_operator());
  if (feed.graphs) {
    text += fmt::format(", {:.0f} us for all as CUDA graphs ({} kernels and copies)",
                        1e6 * feed.graphs->seconds, feed.graphs->num_operations);
  }
  if (!feed.why_no_graph.empty())
    text += fmt::format("; some could not be recorded: {}", feed.why_no_graph);
  return text +
         fmt::format(
             "\nthe host works for {:.0f} us of a step, and waits for the GPU {} times; the GPU is "
             "idle for {:.2f}% of a step of operators given one by one\n",
             1e6 * feed.host_seconds, feed.num_waits, 100 * feed.idle_share);
}

nlohmann::json to_json(const StepBenchResult& result) {
  nlohmann::json gpu = nullptr;
  if (result.gpu) gpu = to_json(*result.gpu);
  nlohmann::json json = {
      {"device", result.device},
      {"seconds", result.seconds},
      {"median_seconds", result.median()},
      {"tokens", result.tokens},
      {"tokens_per_second", static_cast<double>(result.tokens) / result.median()},
      {"flops", result.flops},
      {"tflops", result.flops / result.median() / 1e12},
      {"matrix_peak_tflops", result.matrix_peak / 1e12},
      {"memory_used", result.memory_used},
      {"memory_predicted", result.memory_predicted},
      {"saved_bytes", result.saved_bytes},
      {"offloaded_bytes", result.offloaded_bytes},
      {"parameters", result.parameters},
      {"operators", result.operators},
      {"gpu", gpu}};
  if (result.choice) {
    json["train.recompute"] = result.choice->recompute;
    json["train.offload"] = result.choice->offload;
  }
  return json;
}

nlohmann::json to_json(const LayerBenchResult::Pass& pass) {
  return {{"seconds", pass.seconds},
          {"median_seconds", pass.median()},
          {"flops", pass.flops},
          {"tflops", pass.rate() / 1e12},
          {"operators", pass.operators}};
}

nlohmann::json to_json(const LayerBenchResult& result) {
  return {{"device", result.device},
          {"tokens", result.tokens},
          {"matrix_peak_tflops", result.matrix_peak / 1e12},
          {"forward", to_json(result.forward)},
          {"backward", to_json(result.backward)},
          {"saved_bytes", result.saved_bytes},
          {"transient_bytes", result.transient_bytes},
          {"expert_load", result.expert_load}};
}

void print_pass(const char* name, const LayerBenchResult::Pass& pass, double peak) {
  std::cout << fmt::format(
      "{:<8} {:>9.3f} ms (median of {}, {:.3f} to {:.3f}), {:.4g} TFLOPS of {:.4g} = {:.1f}%\n",
      name, 1e3 * pass.median(), pass.seconds.size(), 1e3 * pass.seconds.front(),
      1e3 * pass.seconds.back(), pass.rate() / 1e12, peak / 1e12, 100 * pass.rate() / peak);
}

std::string describe_load(const std::vector<double>& load) {
  const double total = std::accumulate(load.begin(), load.end(), 0.0);
  return fmt::format("experts' load: the largest is {:.2f} of the mean, {} of {} have no token\n",
                     *std::ranges::max_element(load) * static_cast<double>(load.size()) / total,
                     std::ranges::count(load, 0.0), load.size());
}

void print(const LayerBenchResult& result, const std::string& block, DType dtype) {
  std::cout << fmt::format(
      "{}\n{} block, {} tokens in {}; shares are of a large matrix product's rate\n", result.device,
      block, result.tokens, dtype_name(dtype));
  if (!result.expert_load.empty()) std::cout << describe_load(result.expert_load);
  print_pass("forward", result.forward, result.matrix_peak);
  print_pass("backward", result.backward, result.matrix_peak);
  std::cout << fmt::format("kept for the backward pass: {}, working memory: {}\n",
                           format_bytes(result.saved_bytes), format_bytes(result.transient_bytes));
  std::cout << "by operator, forward:\n";
  print_operators(result.forward.operators);
  std::cout << "backward:\n";
  print_operators(result.backward.operators);
}

LayerBlock parse_block(const std::string& name) {
  if (name == "attention") return LayerBlock::kAttention;
  return name == "mlp" ? LayerBlock::kMlp : LayerBlock::kMoe;
}

int run_layer_bench(const Settings& settings, const BenchArguments& arguments) {
  require(arguments.trace.empty(), "--trace is of whole steps; leave out --layer or --trace");
  const LayerBenchResult result = bench_layer({.settings = settings,
                                               .block = parse_block(arguments.layer),
                                               .runs = arguments.steps,
                                               .warmup = arguments.warmup});
  if (arguments.json) {
    std::cout << to_json(result).dump(2) << "\n";
  } else {
    print(result, arguments.layer, settings.train.dtype());
  }
  return 0;
}

nlohmann::json to_json(const ProductTiles& product) {
  const auto describe = [&](const ProductTiles::Choice& choice, bool taken) -> nlohmann::json {
    return {{"max_rows", choice.max_rows},       {"taken", taken},
            {"tile_rows", choice.tiles.tallest}, {"tiles", choice.tiles.num_tiles},
            {"padding", choice.tiles.padding},   {"idle", choice.tiles.idle},
            {"seconds", choice.seconds},         {"tflops", product.flops / choice.seconds / 1e12}};
  };
  nlohmann::json choices = nlohmann::json::array();
  for (const ProductTiles::Choice& choice : product.choices)
    choices.push_back(describe(choice, choices.empty()));
  nlohmann::json result = {{"product", product.name}, {"expert_sizes", product.expert_sizes},
                           {"width", product.width},  {"by_rows", product.by_rows},
                           {"flops", product.flops},  {"choices", choices}};
  if (product.gathered) result["gathered"] = describe(*product.gathered, true);
  return result;
}

nlohmann::json to_json(const LayerTiles& tiles) {
  nlohmann::json products = nlohmann::json::array();
  for (const ProductTiles& product : tiles.products) products.push_back(to_json(product));
  const auto [least, most] = std::ranges::minmax(tiles.rows_of);
  return {{"gpu", "H200"},
          {"clusters", cuda::kModelClusters},
          {"clock_ghz", cuda::kModelClockHz / 1e9},
          {"tokens", tiles.tokens},
          {"experts", tiles.rows_of.size()},
          {"rows_of_expert", {least, most}},
          {"products", products}};
}

void print(const ProductTiles& product) {
  std::cout << fmt::format("{}: rows times {} of [{}, {}]\n", product.name,
                           product.by_rows ? "the transposed weight" : "the weight",
                           product.expert_sizes, product.width);
  if (product.choices.empty()) {
    std::cout << fmt::format(
        "  not in tiles, by plain kernels: the tensor cores' take at most {} experts, sizes that "
        "are multiples of 8, and along a reduction experts of one size or of multiples of {}\n",
        cuda::kGroupedMaxExperts, cuda::kGroupedReduction);
    return;
  }
  const auto print_choice = [&](const ProductTiles::Choice& choice, const char* what) {
    std::cout << fmt::format(
        "  at most {:3} rows: {:6} tiles of up to {:3} rows, {:4.1f} % padding, clusters {:4.1f} % "
        "idle, {:8.1f} us, {:4.0f} TFLOPS{}\n",
        choice.max_rows, choice.tiles.num_tiles, choice.tiles.tallest, 100 * choice.tiles.padding,
        100 * choice.tiles.idle, 1e6 * choice.seconds, product.flops / choice.seconds / 1e12, what);
  };
  for (const ProductTiles::Choice& choice : product.choices)
    print_choice(choice, &choice == product.choices.data() ? " (taken)" : "");
  if (product.gathered) print_choice(*product.gathered, " (taken where rows are gathered)");
}

int print_tiles(const Settings& settings, const BenchArguments& arguments) {
  require(arguments.layer == "moe", "--tiles is of experts' products; --layer is '{}', give moe",
          arguments.layer);
  const LayerTiles tiles = predict_layer_tiles(settings);
  if (arguments.json) {
    std::cout << to_json(tiles).dump(2) << "\n";
    return 0;
  }
  const auto [least, most] = std::ranges::minmax(tiles.rows_of);
  std::cout << fmt::format(
      "predicted for an H200 with {} clusters of two SMs at {:.3f} GHz: {} tokens, {} "
      "experts with {} rows each\n",
      cuda::kModelClusters, cuda::kModelClockHz / 1e9, tiles.tokens, tiles.rows_of.size(),
      least == most ? fmt::format("{}", most) : fmt::format("{} to {}", least, most));
  for (const ProductTiles& product : tiles.products) print(product);
  return 0;
}

/// What training would have. A tokenizer that is not there matters only where nothing else says it.
int64_t find_vocabulary(const Settings& settings) {
  if (settings.model.vocab_size > 0) return settings.model.vocab_size;
  try {
    return resolve_vocab_size(0, *make_tokenizer(settings.data.tokenizer_spec()));
  } catch (const UserError& error) {
    user_error(
        "{}. A bench needs of the tokenizer only how large the vocabulary is; with "
        "model.vocab_size "
        "set it needs none",
        error.what());
  }
}

/// Seconds of a step as the clock of some hardware has them.
double predict_step(Settings settings, const StepWork& work) {
  if (settings.run.device == DeviceChoice::kAuto)
    settings.run.device = work.hardware().on_host ? DeviceChoice::kCpu : DeviceChoice::kCuda;
  return simulate_step(settings, 1, work, 0).seconds;
}

/// Settings as they were timed.
Settings with_choice(Settings settings, const StepBenchResult& result) {
  if (result.choice) apply(*result.choice, settings.train);
  return settings;
}

int run_calibration(const BenchArguments& arguments, const Settings& settings) {
  check_output_path("--calibrate", arguments.calibration);
  Hardware base;
  if (arguments.hardware.empty()) {
    base.on_host = choose_backend(settings).is_host();
    base.network.gbs = 1;
  } else {
    base = load_hardware(arguments.hardware);
  }
  ProgressBar bar(std::cerr, detect_terminal(STDERR_FILENO), "timing operators");
  const Hardware found =
      calibrate(base, calibration_cases(base.on_host),
                [&](const std::string& name, double share) { bar.update(share, name); });
  bar.clear();
  replace_file(arguments.calibration, write_hardware(found));
  std::cout << fmt::format(
      "{}: {} operators' times, {:.2f} us between operators, {:.0f} us a step\n",
      arguments.calibration, found.measured.size(), found.gap_microseconds,
      found.step_microseconds);
  return 0;
}

}  // namespace

int run_bench(const BenchArguments& arguments) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, arguments.config.file, arguments.config.overrides);
  settings.model.vocab_size = find_vocabulary(settings);
  settings = without_data(std::move(settings));
  if (!arguments.calibration.empty()) return run_calibration(arguments, settings);
  if (arguments.tiles) return print_tiles(settings, arguments);
  if (!arguments.layer.empty()) return run_layer_bench(settings, arguments);
  if (!arguments.trace.empty()) check_output_path("--trace", arguments.trace);
  std::optional<StepWork> work;
  if (!arguments.hardware.empty()) {
    SimulationOptions as_run;
    if (settings.run.cuda_graphs == GraphMode::kOff) as_run.software.graphs = LaunchGraphs::kNone;
    work.emplace(load_hardware(arguments.hardware), as_run);
  }
  TraceRecorder recorder(TraceRecorder::Clock::now());
  const StepBenchResult result =
      bench_step({.settings = settings,
                  .steps = arguments.steps,
                  .warmup = arguments.warmup,
                  .steps_only = arguments.steps_only,
                  .trace = arguments.trace.empty() ? nullptr : &recorder});
  if (!arguments.trace.empty()) {
    const auto world = make_single_world();
    write_trace(recorder, arguments.trace, *world->make_world_group());
  }
  std::optional<double> predicted;
  if (work) predicted = predict_step(with_choice(settings, result), *work);
  if (arguments.json) {
    nlohmann::json json = to_json(result);
    if (predicted) json["predicted_seconds"] = *predicted;
    std::cout << json.dump(2) << "\n";
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
  if (result.offloaded_bytes > 0) {
    std::cout << fmt::format("saved activations: {} on the device, {} offloaded to the host\n",
                             format_bytes(result.saved_bytes),
                             format_bytes(result.offloaded_bytes));
  }
  if (predicted) {
    std::cout << fmt::format("{} predicted a step of {:.1f} ms ({:+.1f}%)\n", arguments.hardware,
                             1e3 * *predicted, 100 * (*predicted / result.median() - 1));
  }
  if (result.choice) std::cout << describe(*result.choice) << "\n";
  if (result.gpu) std::cout << describe_feed(*result.gpu);
  if (result.operators.empty()) return 0;
  std::cout << "by operator, in a step in which each is timed:\n";
  print_operators(result.operators);
  return 0;
}

}  // namespace tessera
