// The operators of a training step on the CPU that are neither products nor attention, in the
// shapes of the preset `workstation` with 16 sequences of 512 tokens: time, bytes that must move
// (Operator::cost) and how near that is to a copy of as many bytes, and what all calls of a step
// take. A copy of 256 MiB before each call leaves none of its operands in a cache. With
// OMP_NUM_THREADS=1 times are CPU time, which other processes change less.
//
//   step_ops_bench [f32|bf16] [rounds] [part of a name]

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory.h"
#include "core/random.h"
#include "cpu_time.h"
#include "ops/adamw/adamw.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/grad_norm/grad_norm.h"
#include "ops/permute/permute.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"
#include "ops/route_map/route_map.h"
#include "ops/router/router.h"

namespace tessera {
namespace {

constexpr int64_t kTokens = 8192, kHidden = 512, kInner = 1024, kExperts = 8, kTopK = 2;
constexpr int64_t kLayers = 8, kHeads = 8;
constexpr int64_t kParameters = 142'647'808;
/// AdamW and the norm are timed on a part of the parameters.
constexpr int64_t kSlice = int64_t{1} << 25;

struct BenchOptions {
  DType dtype = DType::kBF16;
  int rounds = 7;
  std::string_view wanted;
};

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + std::ssize(values) / 2);
  return values[values.size() / 2];
}

OwnedTensor random_values(DType dtype, const Shape& shape) {
  OwnedTensor tensor(dtype, shape);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    const auto mixed = static_cast<uint32_t>(i) * 0x9e3779b1U;
    const float value = static_cast<float>((mixed ^ (mixed >> 15U)) & 0xffffU) / 32768.0F - 1.0F;
    if (dtype == DType::kF32) {
      tensor.get().as<float>()[i] = value;
    } else {
      tensor.get().as<Bf16>()[i] = Bf16(value);
    }
  }
  return tensor;
}

/// A copy of 128 MiB by all threads, 256 MiB moved.
class Copy {
 public:
  Copy() : from_(kBytes, "a copy"), to_(kBytes, "a copy") {}
  static constexpr double kMoved = 2.0 * (int64_t{128} << 20);
  void run() const {
    constexpr int64_t kChunk = 65536;
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < kBytes; at += kChunk)
      std::memcpy(to_.data() + at, from_.data() + at, kChunk);
  }

 private:
  static constexpr int64_t kBytes = int64_t{128} << 20;
  Buffer from_;
  Buffer to_;
};

class Bench {
 public:
  explicit Bench(const BenchOptions& options) : options_(options) {
    add_adamw_cpu(kernels_);
    add_expert_activation_cpu(kernels_);
    add_grad_norm_cpu(kernels_);
    add_permute_cpu(kernels_);
    add_rmsnorm_cpu(kernels_);
    add_rope_cpu(kernels_);
    add_route_map_cpu(kernels_);
    add_router_cpu(kernels_);
    std::vector<double> times;
    for (int round = 0; round < 7; ++round) times.push_back(cpu_seconds([&] { copy_.run(); }));
    copy_rate_ = Copy::kMoved / median(times);
    fmt::print("{} threads, a copy {:.1f} GB/s\n{:32} {:>5} {:>9} {:>7} {:>7} {:>9}\n",
               omp_get_max_threads(), copy_rate_ * 1e-9, dtype_name(options.dtype), "calls", "us",
               "GB/s", "copy", "ms a step");
  }

  /// Runs `op` once, and times it where it is wanted; `calls` of a step take as long. Returns what
  /// it gave.
  std::vector<OwnedTensor> run(const Operator& op, const std::vector<Tensor>& inputs,
                               double calls) {
    std::vector<ValueType> types;
    for (const Tensor& input : inputs) types.push_back({input.dtype, input.shape});
    std::vector<OwnedTensor> outputs;
    const std::vector<ValueType> output_types = op.infer(types);
    for (const ValueType& type : output_types) outputs.emplace_back(type.dtype, type.shape);
    const Kernel& kernel = kernels_.find(op.name())->second;
    const Buffer workspace(kernel.workspace_bytes(op, types), "a benchmark");
    const std::vector<Tensor> out(outputs.begin(), outputs.end());
    const auto call = [&] { kernel(op, {inputs, out, workspace.bytes()}); };
    call();
    if (op.name().find(options_.wanted) != std::string_view::npos)
      report(op.name(), op.cost(types, output_types).bytes, calls, call);
    return outputs;
  }

  double total() const { return total_; }

 private:
  void report(std::string_view name, double bytes, double calls,
              const std::function<void()>& call) {
    std::vector<double> times;
    for (int round = 0; round < options_.rounds; ++round) {
      copy_.run();
      times.push_back(cpu_seconds(call));
    }
    const double time = median(std::move(times));
    total_ += time * calls;
    fmt::print("{:32} {:5.1f} {:9.1f} {:7.1f} {:6.0f}% {:9.2f}\n", name, calls, time * 1e6,
               bytes / time * 1e-9, 100 * bytes / copy_rate_ / time, time * calls * 1e3);
  }

  BenchOptions options_;
  KernelTable kernels_;
  Copy copy_;
  double copy_rate_ = 0;
  double total_ = 0;
};

void bench_experts(Bench& bench, DType dtype, const Tensor& x) {
  const OwnedTensor weight = random_values(DType::kF32, {kExperts, kHidden});
  const OwnedTensor one(DType::kF32, {1});
  const Router router({.num_experts = kExperts, .top_k = kTopK, .normalize_top_k = true});
  const auto routed = bench.run(router, {x, weight}, kLayers);
  const Tensor& probs = routed[Router::kProbs];
  const Tensor& expert_idx = routed[Router::kExpertIdx];
  const RouteMap route_map({.num_experts = kExperts, .top_k = kTopK});
  const auto map = bench.run(route_map, {expert_idx}, kLayers);
  const Tensor& row_of = map[RouteMap::kRowOfTK];
  const Tensor& source = map[RouteMap::kSourceR];
  const Tensor& offsets = map[RouteMap::kOffsets];
  const auto rows = bench.run(*make_permute(), {x, source, row_of}, 2 * kLayers);
  const auto row_probs = bench.run(*make_permute_probs(), {probs, source, row_of}, kLayers);
  const ExpertActivation activation({.function = Activation::kSwiGLU,
                                     .expert_sizes = std::vector<int64_t>(kExperts, kInner),
                                     .apply_prob = true});
  const OwnedTensor pre = random_values(dtype, {kTokens * kTopK, 2 * kInner});
  const auto act = bench.run(activation, {pre, row_probs[0], offsets}, kLayers);
  bench.run(ExpertActivationBackward(activation), {act[0], pre, row_probs[0], offsets}, kLayers);
  bench.run(*make_unpermute_probs(), {row_probs[0], row_of, source}, kLayers);
  const auto sums = bench.run(*make_unpermute(), {rows[0], row_of, source}, 2 * kLayers);
  const RouterGradients gradients{
      .probs = true, .balance_loss = true, .z_loss = true, .addend = true};
  bench.run(RouterBackward(router.spec(), gradients),
            {x, weight, routed[Router::kLogits], expert_idx, routed[Router::kCounts], probs, one,
             one, sums[0]},
            kLayers);
}

void bench_rows(Bench& bench, DType dtype, const Tensor& x) {
  const OwnedTensor weight = random_values(DType::kF32, {kHidden});
  const auto norm = bench.run(*make_rmsnorm(1e-5), {x, weight}, 2 * kLayers);
  const OwnedTensor grad = random_values(dtype, {kTokens, kHidden});
  bench.run(RmsNormBackward(), {x, weight, norm[1], grad}, 2 * kLayers);
  OwnedTensor positions(DType::kI32, {kTokens});
  for (int64_t t = 0; t < kTokens; ++t)
    positions.get().as<int32_t>()[t] = static_cast<int32_t>(t % 512);
  const RotarySpec rotary{.num_heads = kHeads,
                          .head_size = 64,
                          .inverse_frequencies = default_inverse_frequencies(64, 10000.0)};
  // Queries and keys are rotated in one call of the step, by two calls here; forward and back.
  bench.run(*make_rope(rotary), {x, positions}, 4 * kLayers);
}

void bench_update(Bench& bench, DType dtype) {
  constexpr double kShare = static_cast<double>(kParameters) / static_cast<double>(kSlice);
  const OwnedTensor grad = random_values(DType::kF32, {kSlice});
  AdamWFactors factors = make_adamw_factors({}, 1e-3, 1);
  AdamWGradScale scale{1, 0};
  bench.run(*make_sum_of_squares(), {grad}, kShare);
  bench.run(*make_adamw({.bf16_weight = dtype == DType::kBF16}),
            {grad, view_of(factors), view_of(scale)}, kShare);
}

void run(const BenchOptions& options) {
  Bench bench(options);
  {
    const OwnedTensor x = random_values(options.dtype, {kTokens, kHidden});
    bench_experts(bench, options.dtype, x);
    bench_rows(bench, options.dtype, x);
  }
  bench_update(bench, options.dtype);
  fmt::print("{:32} {:43.2f}\n", "all", bench.total() * 1e3);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::BenchOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "f32" || argument == "bf16") {
      options.dtype = argument == "f32" ? tessera::DType::kF32 : tessera::DType::kBF16;
    } else if (const int rounds = std::atoi(argv[i]); rounds > 0) {
      options.rounds = rounds;
    } else {
      options.wanted = argument;
    }
  }
  tessera::run(options);
  return 0;
}
