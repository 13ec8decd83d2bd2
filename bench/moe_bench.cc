// Speed of the routed operators. Products are given in GFLOP/s and as a share of the plain product
// of the same size in the same run; everything else in GB/s of the bytes that must move.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>

#include "core/memory.h"
#include "core/random.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/gemm/gemm.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/permute/permute.h"
#include "ops/route_map/route_map.h"
#include "ops/router/router.h"

namespace tessera {
namespace {

constexpr int kRepeats = 25;

/// The least time of each of several functions, called in turn so that a busy machine slows all.
std::vector<double> best_seconds(const std::vector<std::function<void()>>& runs) {
  std::vector<double> best(runs.size(), std::numeric_limits<double>::infinity());
  for (int i = 0; i < kRepeats; ++i) {
    for (size_t j = 0; j < runs.size(); ++j) {
      const auto start = std::chrono::steady_clock::now();
      runs[j]();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      best[j] = std::min(best[j], took.count());
    }
  }
  return best;
}

double best_seconds(const std::function<void()>& run) {
  return best_seconds(std::vector<std::function<void()>>{run})[0];
}

OwnedTensor random_values(DType dtype, const Shape& shape, Random& random) {
  OwnedTensor tensor(dtype, shape);
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    const auto value = static_cast<float>(random.next_uniform() - 0.5);
    if (dtype == DType::kF32) {
      tensor.get().as<float>()[i] = value;
    } else {
      tensor.get().as<Bf16>()[i] = Bf16(value);
    }
  }
  return tensor;
}

/// Runs operators by name, with memory for their outputs.
class Runner {
 public:
  Runner() {
    add_router_cpu(kernels_);
    add_route_map_cpu(kernels_);
    add_permute_cpu(kernels_);
    add_expert_activation_cpu(kernels_);
    add_grouped_matmul_cpu(kernels_);
  }

  std::vector<OwnedTensor> outputs(const Operator& op, const std::vector<Tensor>& inputs) const {
    std::vector<OwnedTensor> result;
    for (const ValueType& type : op.infer(types(inputs))) {
      result.emplace_back(type.dtype, type.shape);
    }
    return result;
  }

  void run(const Operator& op, const std::vector<Tensor>& inputs,
           const std::vector<OwnedTensor>& outputs) {
    const int64_t bytes = kernels_.find(op.name())->second.workspace_bytes(op, types(inputs));
    if (workspace_.num_bytes() < bytes) workspace_ = Buffer(bytes, "workspace");
    const std::vector<Tensor> out(outputs.begin(), outputs.end());
    kernels_.find(op.name())->second(op, {inputs, out, workspace_.bytes()});
  }

 private:
  static std::vector<ValueType> types(const std::vector<Tensor>& inputs) {
    std::vector<ValueType> result;
    for (const Tensor& input : inputs) result.push_back({input.dtype, input.shape});
    return result;
  }

  KernelTable kernels_;
  Buffer workspace_;
};

struct Setting {
  DType dtype;
  int64_t num_tokens, hidden_size, inner_size, num_experts, top_k;
  int64_t num_rows() const { return num_tokens * top_k; }
};

/// Offsets of R rows over E experts: even, or with `share` of them at expert 0 and the rest uneven.
OwnedTensor make_offsets(const Setting& s, double share, Random& random) {
  OwnedTensor offsets(DType::kI64, {s.num_experts + 1});
  std::vector<double> weights(s.num_experts, 1.0);
  if (share > 0) {
    double rest = 0;
    for (size_t e = 1; e < weights.size(); ++e) rest += weights[e] = 0.5 + random.next_uniform();
    weights[0] = rest * share / (1 - share);
  }
  double total = 0;
  for (const double weight : weights) total += weight;
  double sum = 0;
  for (size_t e = 0; e < weights.size(); ++e) {
    sum += weights[e];
    offsets.get().as<int64_t>()[e + 1] =
        std::llround(static_cast<double>(s.num_rows()) * sum / total);
  }
  return offsets;
}

/// One plain product of all the rows with one expert's matrix: [R, H] · [F, H]ᵀ.
void plain_product(const Setting& s, const Tensor& a, const Tensor& weight, const Tensor& y) {
  gemm({.transpose_b = true,
        .m = s.num_rows(),
        .n = s.inner_size,
        .k = s.hidden_size,
        .a = a.data,
        .lda = s.hidden_size,
        .b = weight.data,
        .ldb = s.hidden_size,
        .c = y.data,
        .ldc = s.inner_size,
        .input_type = s.dtype,
        .output_type = s.dtype});
}

void bench_products(const Setting& s) {
  Runner runner;
  Random random(1, 2);
  const std::vector<int64_t> sizes(s.num_experts, s.inner_size);
  const auto wide = random_values(s.dtype, {s.num_rows(), s.hidden_size}, random);
  const auto narrow = random_values(s.dtype, {s.num_rows(), s.inner_size}, random);
  const auto weight = random_values(s.dtype, {s.num_experts * s.inner_size, s.hidden_size}, random);
  const OwnedTensor result(s.dtype, {s.num_rows(), s.inner_size});
  const double flops = 2.0 * static_cast<double>(s.num_rows() * s.hidden_size * s.inner_size);
  fmt::print("{} T {} H {} F {} E {} K {}\n", dtype_name(s.dtype), s.num_tokens, s.hidden_size,
             s.inner_size, s.num_experts, s.top_k);

  const GroupedMatmul out({sizes, GroupedSide::kOut});
  const GroupedMatmul in({sizes, GroupedSide::kIn});
  const GroupedMatmulWgrad wgrad(out.sizes());
  const auto even = make_offsets(s, 0.0, random);
  const auto skewed = make_offsets(s, 0.5, random);
  const auto report = [&](std::string_view what, const Operator& op, const Tensor& a,
                          const Tensor& b) {
    const auto memory = runner.outputs(op, {a, b, even});
    const auto seconds = best_seconds({[&] { plain_product(s, wide, weight, result); },
                                       [&] {
                                         runner.run(op, {a, b, even}, memory);
                                       },
                                       [&] {
                                         runner.run(op, {a, b, skewed}, memory);
                                       }});
    fmt::print(
        "  {:6} plain {:5.0f} GFLOP/s; even {:5.0f}, {:3.0f} % of plain; half at one expert "
        "{:5.0f}, {:+.1f} % against even\n",
        what, flops / seconds[0] * 1e-9, flops / seconds[1] * 1e-9, 100 * seconds[0] / seconds[1],
        flops / seconds[2] * 1e-9, 100 * (seconds[1] / seconds[2] - 1));
  };
  report("out", out, wide, weight);
  report("in", in, narrow, weight);
  report("wgrad", wgrad, narrow, wide);
}

void report_bytes(std::string_view what, double seconds, double bytes) {
  fmt::print("  {:28} {:8.2f} ms {:6.1f} GB/s\n", what, seconds * 1e3, bytes / seconds * 1e-9);
}

void bench_movement(const Setting& s) {
  Runner runner;
  Random random(3, 4);
  fmt::print("{} T {} H {} F {} E {} K {}\n", dtype_name(s.dtype), s.num_tokens, s.hidden_size,
             s.inner_size, s.num_experts, s.top_k);
  const auto x = random_values(s.dtype, {s.num_tokens, s.hidden_size}, random);
  const auto router_weight = random_values(DType::kF32, {s.num_experts, s.hidden_size}, random);
  const OwnedTensor copy(s.dtype, x.get().shape);
  const double copied = best_seconds([&] {
    std::copy_n(static_cast<const std::byte*>(x.get().data), x.get().num_bytes(),
                static_cast<std::byte*>(copy.get().data));
  });
  report_bytes("copy (one thread)", copied, 2.0 * static_cast<double>(x.get().num_bytes()));

  const auto time = [&](std::string_view what, const Operator& op,
                        const std::vector<Tensor>& inputs) {
    auto out = runner.outputs(op, inputs);
    double bytes = 0;
    for (const Tensor& tensor : inputs) bytes += static_cast<double>(tensor.num_bytes());
    for (const OwnedTensor& tensor : out) bytes += static_cast<double>(tensor.get().num_bytes());
    report_bytes(what, best_seconds([&] { runner.run(op, inputs, out); }), bytes);
    return out;
  };
  const Router router({.num_experts = s.num_experts, .top_k = s.top_k});
  const auto routed = time("router", router, {x, router_weight});
  const Tensor& probs = routed[RouterOutput::kProbs];
  const Tensor& expert_idx = routed[RouterOutput::kExpertIdx];
  const OwnedTensor one(DType::kF32, {1});
  time("router_backward",
       RouterBackward(router.spec(), {.probs = true, .balance_loss = true, .z_loss = true}),
       {x, router_weight, routed[RouterOutput::kLogits], expert_idx, routed[RouterOutput::kCounts],
        probs, one, one});
  const RouteMap route_map({.num_experts = s.num_experts, .top_k = s.top_k});
  const auto map = time("route_map", route_map, {expert_idx, probs});
  const Tensor& row_of_TK = map[RouteMapOutput::kRowOfTK];
  const Tensor& source_R = map[RouteMapOutput::kSourceR];
  const auto rows = time("permute", *make_permute(), {x, source_R, row_of_TK});
  time("unpermute", *make_unpermute(), {rows[0], row_of_TK, source_R});
  time("unpermute_weighted", *make_unpermute_weighted(), {rows[0], probs, row_of_TK, source_R});
  const auto probs_R = time("permute_probs", *make_permute_probs(), {probs, source_R, row_of_TK});
  const ExpertActivation activation(
      {.function = Activation::kSwiGLU,
       .expert_sizes = std::vector<int64_t>(s.num_experts, s.inner_size),
       .apply_prob = true});
  const auto pre = random_values(s.dtype, {s.num_rows(), 2 * s.inner_size}, random);
  const Tensor& offsets = map[RouteMapOutput::kOffsets];
  const auto act = time("expert_activation", activation, {pre, probs_R[0], offsets});
  time("expert_activation_backward", ExpertActivationBackward(activation),
       {act[0], pre, probs_R[0], offsets});
}

void run() {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    bench_products({dtype, 4096, 512, 1024, 8, 2});
    bench_products({dtype, 8192, 512, 1024, 8, 2});
    bench_products({dtype, 4096, 512, 256, 64, 4});
    bench_products({dtype, 1, 512, 1024, 8, 2});
  }
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    bench_movement({dtype, 8192, 512, 1024, 8, 2});
    bench_movement({dtype, 4096, 512, 256, 64, 4});
  }
}

}  // namespace
}  // namespace tessera

int main() {
  tessera::run();
  return 0;
}
