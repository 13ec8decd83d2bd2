// Tokens a second of 1, 4, 16 and 64 sequences that are written at once, and of a prompt that is
// read, for some layers of Qwen3-30B-A3B in BF16 with random weights. Beside them the bound: the
// bytes of weights that a pass must read, experts as balanced routing touches them, at the speed at
// which all threads read memory here, or a GPU copies its own. `decoding_bench [LAYERS [cuda]]`.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ops/registry/cpu_kernels.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/infer/decoding_batch.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPromptTokens = 64;
constexpr int64_t kTimedPasses = 6;
constexpr int kRounds = 4;  // of a prompt, the last of which is timed
constexpr double kBytesPerWeight = 2;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

ModelConfig bench_model(int64_t num_layers) {
  ModelConfig config;
  config.vocab_size = 151936;
  config.hidden_size = 2048;
  config.num_layers = num_layers;
  config.num_heads = 32;
  config.num_kv_heads = 4;
  config.head_size = 128;
  config.qk_norm = QkNorm::kHead;
  config.tie_embeddings = false;
  config.moe.num_experts = 128;
  config.moe.top_k = 8;
  config.moe.inner_size = 768;
  return config;
}

/// Bytes a second that all threads read, the best of some attempts.
double read_bandwidth() {
  const std::vector<int64_t> memory(size_t{1} << 27, 1);
  double best = 0;
  for (int attempt = 0; attempt < 4; ++attempt) {
    const auto begin = Clock::now();
    int64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (size_t i = 0; i < memory.size(); ++i) sum += memory[i];
    const double seconds = seconds_since(begin);
    if (sum == 0) std::cout << "";
    best = std::max(best, static_cast<double>(memory.size() * sizeof(int64_t)) / seconds);
  }
  return best;
}

/// Bytes a second that a GPU reads and writes as it copies, the best of some attempts.
double copy_bandwidth(Device& device) {
  constexpr int64_t kBytes = int64_t{1} << 31;
  const OwnedTensor from(DType::kU8, {kBytes}, "the benchmark", device);
  const OwnedTensor to(DType::kU8, {kBytes}, "the benchmark", device);
  double best = 0;
  for (int attempt = 0; attempt < 4; ++attempt) {
    device.synchronize();
    const auto begin = Clock::now();
    device.copy(to.get().data, from.get().data, kBytes);
    device.synchronize();
    best = std::max(best, 2.0 * static_cast<double>(kBytes) / seconds_since(begin));
  }
  return best;
}

double bandwidth_of(const Backend& backend) {
  return backend.is_host() ? read_bandwidth() : copy_bandwidth(backend.device());
}

/// Bytes of the weights that a pass with so many tokens reads.
double weight_bytes(const ModelConfig& config, int64_t num_tokens) {
  const auto h = static_cast<double>(config.hidden_size);
  const auto heads = static_cast<double>(2 * config.num_heads + 2 * config.num_kv_heads);
  const double attention = h * heads * static_cast<double>(config.head_dim());
  const auto experts = static_cast<double>(config.moe.num_experts);
  const double missed = std::pow(1 - static_cast<double>(config.moe.top_k) / experts, num_tokens);
  const double of_experts =
      experts * (1 - missed) * 3 * h * static_cast<double>(config.moe.inner_size);
  const double head = h * static_cast<double>(config.vocab_size);
  const auto layers = static_cast<double>(config.num_layers);
  return kBytesPerWeight * (layers * (attention + of_experts) + head);
}

DecodingRequest make_request(const ModelConfig& config, int64_t number, int64_t prompt_tokens) {
  Random random(7, static_cast<uint64_t>(number));
  DecodingRequest request;
  for (int64_t i = 0; i < prompt_tokens; ++i)
    request.prompt.push_back(
        static_cast<int32_t>(random.next_below(static_cast<uint64_t>(config.vocab_size))));
  request.options.max_tokens = 40;
  request.options.temperature = 0;
  return request;
}

struct Bench {
  Backend backend;
  ModelConfig config;
  ParameterSet parameters;
  std::vector<ExpertState> experts;
  double bandwidth;

  Bench(int64_t num_layers, Backend own)
      : backend(std::move(own)),
        config(bench_model(num_layers)),
        parameters(list_parameters(config, DType::kBF16), false, backend.device()),
        experts(make_expert_states(config, backend.device())),
        bandwidth(bandwidth_of(backend)) {
    parameters.initialize(1);
  }

  DecodingBatch make_batch(const DecodingLimits& limits) {
    return {config, DType::kBF16, backend, parameters, experts, limits};
  }

  void decode(int64_t num_sequences) {
    DecodingBatch batch = make_batch({.max_sequences = num_sequences, .context = 512});
    for (int64_t i = 0; i < num_sequences; ++i) batch.add(make_request(config, i, kPromptTokens));
    // Until all prompts are read, and the model of the passes that are timed is made, and recorded.
    while (std::ssize(batch.step()) < num_sequences) continue;
    for (int pass = 0; pass < 3; ++pass) batch.step();
    const auto begin = Clock::now();
    int64_t num_tokens = 0;
    int64_t num_passes = 0;
    while (num_passes < kTimedPasses && !batch.is_idle()) {
      num_tokens += std::ssize(batch.step());
      ++num_passes;
    }
    const double seconds = seconds_since(begin);
    const double bound =
        bandwidth / weight_bytes(config, num_sequences) * static_cast<double>(num_sequences);
    const double reached = static_cast<double>(num_tokens) / seconds;
    std::cout << fmt::format("{:>9}  {:>8.2f}  {:>10.2f}  {:>5.1f} %\n", num_sequences, reached,
                             bound, 100 * reached / bound);
  }

  /// Seconds of a prompt in one pass.
  double prefill(int64_t num_tokens) {
    DecodingBatch timed =
        make_batch({.max_sequences = 1, .context = num_tokens + 40, .max_rows = num_tokens});
    double seconds = 0;
    for (int round = 0; round < kRounds; ++round) {
      timed.add(make_request(config, round, num_tokens));
      const auto begin = Clock::now();
      timed.step();
      seconds = seconds_since(begin);
      timed.remove(round);
    }
    return seconds;
  }
  /// Seconds of the forward pass of an evaluation, with the loss of each token.
  double forward(int64_t num_tokens) {
    const BatchShape shape{.num_tokens = num_tokens, .dtype = DType::kBF16};
    ForwardModel model(config, shape, ForwardGoal::kLoss, backend, parameters, experts);
    const OwnedTensor tokens(DType::kI32, {num_tokens});
    const OwnedTensor positions(DType::kI32, {num_tokens});
    const OwnedTensor bounds(DType::kI32, {2});
    std::ranges::copy(make_request(config, 1, num_tokens).prompt, tokens.get().as<int32_t>());
    std::iota(positions.get().as<int32_t>(), positions.get().as<int32_t>() + num_tokens, 0);
    bounds.get().as<int32_t>()[1] = static_cast<int32_t>(num_tokens);
    double seconds = 0;
    for (int round = 0; round < kRounds; ++round) {
      const auto begin = Clock::now();
      model.run_loss({tokens, tokens, positions, bounds});
      seconds = seconds_since(begin);
    }
    return seconds;
  }
  void read_prompt(int64_t num_tokens) {
    const auto tokens = static_cast<double>(num_tokens);
    std::cout << fmt::format(
        "a prompt of {} tokens is read at {:.1f} tokens/s, evaluated at {:.1f}\n", num_tokens,
        tokens / prefill(num_tokens), tokens / forward(num_tokens));
  }
};

int run(int argc, char** argv) {
  const int64_t num_layers = argc > 1 ? std::atoll(argv[1]) : 2;
  const bool on_gpu = argc > 2 && std::string(argv[2]) == "cuda";
  Bench bench(num_layers, on_gpu ? make_cuda_backend(0) : Backend(make_cpu_kernels()));
  std::cout << fmt::format("{} layers of Qwen3-30B-A3B, BF16, {:.1f} GB/s\n", num_layers,
                           bench.bandwidth / 1e9);
  std::cout << "sequences  tokens/s  at the bound  reached\n";
  for (const int64_t count : {1, 4, 16, 64}) bench.decode(count);
  bench.read_prompt(256);
  if (on_gpu) bench.read_prompt(4096);
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    return tessera::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "decoding_bench: " << error.what() << "\n";
    return 2;
  }
}
