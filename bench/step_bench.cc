// A whole training step (forward, backward, AdamW) of the MoE that the project's speed target
// names: hidden 512, 8 layers, 8 experts, top-2, inner size 1024, sequences of 512, vocabulary
// 32,768. Prints the share of the machine's large-matrix rate, measured in the same run, counting
// model FLOPs only; the time by operator; and memory, measured and predicted.
//   step_bench [f32|bf16] [micro_batch] [steps] [--balanced] [--sparse]

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>
#include <map>

#include "core/memory.h"
#include "core/process/stopwatch.h"
#include "core/random.h"
#include "ops/registry/cpu_kernels.h"
#include "train/setup/machine.h"
#include "train/setup/matrix_peak.h"
#include "train/state/model_state.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

struct BenchOptions {
  DType dtype = DType::kF32;
  int64_t micro_batch = 16;
  int64_t steps = 3;
  bool balanced = false;
  bool sparse = false;
};

BenchOptions parse(int argc, char** argv) {
  BenchOptions options;
  std::vector<int64_t> numbers;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "bf16")
      options.dtype = DType::kBF16;
    else if (argument == "f32")
      options.dtype = DType::kF32;
    else if (argument == "--balanced")
      options.balanced = true;
    else if (argument == "--sparse")
      options.sparse = true;
    else
      numbers.push_back(std::stoll(argv[i]));
  }
  if (!numbers.empty()) options.micro_batch = numbers[0];
  if (numbers.size() > 1) options.steps = numbers[1];
  return options;
}

constexpr int64_t kSequence = 512;

ModelConfig bench_model(const BenchOptions& options) {
  ModelConfig config;
  config.vocab_size = 32768;
  config.hidden_size = 512;
  config.num_layers = 8;
  config.num_heads = 8;
  config.tie_embeddings = false;
  config.moe.num_experts = 8;
  config.moe.top_k = 2;
  config.moe.inner_size = 1024;
  config.moe.force_balanced = options.balanced;
  if (options.sparse) config.moe.experts = ExpertPath::kBlockSparse;
  return config;
}

/// Random tokens, each its own next token's label.
struct Tokens {
  std::vector<int32_t> tokens, labels, positions, cu_seqlens;
  explicit Tokens(int64_t sequences) {
    Random random(1, 1);
    cu_seqlens.push_back(0);
    for (int64_t i = 0; i < sequences * kSequence; ++i) {
      tokens.push_back(static_cast<int32_t>(random.next_below(32768)));
      labels.push_back(static_cast<int32_t>(random.next_below(32768)));
      positions.push_back(static_cast<int32_t>(i % kSequence));
      if ((i + 1) % kSequence == 0) cu_seqlens.push_back(static_cast<int32_t>(i + 1));
    }
  }
  MicroBatch view() {
    const auto make = [](std::vector<int32_t>& ids) {
      return tessera::view(std::span(ids), {static_cast<int64_t>(ids.size())});
    };
    return {make(tokens), make(labels), make(positions), make(cu_seqlens)};
  }
};

void print_operators(const std::map<std::string, double>& seconds, double total, int64_t steps) {
  std::vector<std::pair<double, std::string>> rows;
  for (const auto& [name, time] : seconds) rows.emplace_back(time, name);
  std::ranges::sort(rows, std::greater<>());
  for (const auto& [time, name] : rows) {
    std::cout << fmt::format("  {:<34} {:>8.1f} ms  {:>5.1f}%\n", name,
                             1e3 * time / static_cast<double>(steps), 100 * time / total);
  }
}

void run(const BenchOptions& options) {
  MatrixPeak peak =
      make_matrix_peak(measure_matrix_peak(options.dtype), MatrixPeakMeter(options.dtype));
  const ModelConfig config = bench_model(options);
  const BatchShape shape{.num_tokens = options.micro_batch * kSequence,
                         .max_sequences = options.micro_batch,
                         .sequence_length = kSequence,
                         .dtype = options.dtype};
  const int64_t base = process_memory().held();
  TrainingModel model(config, shape, {}, make_cpu_kernels());
  Settings settings;
  settings.model = config;
  settings.train.precision = options.dtype == DType::kBF16 ? Precision::kBF16 : Precision::kF32;
  settings.train.micro_batch = settings.train.global_batch = options.micro_batch;
  const auto world = make_single_world();
  const RunLayout layout = make_run_layout(settings, *world);
  const int64_t predicted =
      base + ModelState::count_bytes(settings, layout).total() + model.activation_bytes().total();
  ModelState state(settings, layout, *world);
  state.initialize(1);
  model.bind(state.parameters(), state.experts());
  Tokens tokens(options.micro_batch);
  const LossScales scales{.loss = 1.0F / static_cast<float>(shape.num_tokens), .balance = 0.01F};

  std::map<std::string, double> operators;
  std::vector<double> times;
  for (int64_t step = 0; step <= options.steps; ++step) {
    const bool warm = step > 0;
    const NodeObserver observe = [&](const NodeEvent& event) {
      if (warm) operators[std::string(event.node.op->name())] += event.seconds();
    };
    const auto start = Clock::now();
    state.step_parameters().begin();
    model.begin_step();
    const double zeroed = seconds_since(start);
    model.run(tokens.view(), scales, observe);
    const auto update = Clock::now();
    state.optimizer().step({.step_idx = step, .lr = 1e-4, .max_grad_norm = 1.0});
    if (!warm) continue;
    operators["(zero gradients)"] += zeroed;
    operators["(gradient norm, AdamW)"] += seconds_since(update);
    times.push_back(seconds_since(start));
  }
  std::ranges::sort(times);
  const double median = times[times.size() / 2];
  double total = 0;
  for (const double time : times) total += time;
  const int64_t used = process_memory().peak;
  peak.share_of(model.model_flops() / times.front());
  std::cout << fmt::format(
      "{} micro_batch {}: {:.3f} s a step (median of {}), {:.0f} tokens/s, {:.1f} GFLOPS of {:.1f} "
      "= {:.1f}% of the "
      "matrix rate\nmemory: {} at the peak, {} predicted ({:+.2f}%)\n",
      dtype_name(options.dtype), options.micro_batch, median, times.size(),
      static_cast<double>(shape.num_tokens) / median, model.model_flops() / median / 1e9,
      peak.value() / 1e9, 100 * model.model_flops() / median / peak.value(), format_bytes(used),
      format_bytes(predicted),
      100.0 * (static_cast<double>(used) / static_cast<double>(predicted) - 1));
  print_operators(operators, total, options.steps);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::run(tessera::parse(argc, argv));
  return 0;
}
