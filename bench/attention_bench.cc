// Attention against the matrix rate of the same run: model FLOPs of forward and backward, at 8192
// tokens in sequences of 512. Prints GFLOP/s and the share of a large gemm in the same type.

#include <omp.h>

#include <chrono>
#include <functional>
#include <limits>
#include <vector>

#include "core/memory.h"
#include "core/random.h"
#include "ops/attention/attention.h"
#include "ops/gemm/gemm.h"

namespace tessera {
namespace {

constexpr int64_t kTokens = 8192;
constexpr int64_t kSequence = 512;
constexpr int kRepeats = 7;

double best_seconds(const std::function<void()>& work) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (i > 0) best = std::min(best, taken.count());
  }
  return best;
}

OwnedTensor random_tensor(const ValueType& type) {
  OwnedTensor tensor(type.dtype, type.shape);
  Random random(1, static_cast<uint64_t>(type.shape.last()));
  for (int64_t i = 0; i < type.shape.num_elements(); ++i) {
    const auto value = static_cast<float>(2 * random.next_uniform() - 1);
    if (type.dtype == DType::kF32) {
      tensor.get().as<float>()[i] = value;
    } else {
      tensor.get().as<Bf16>()[i] = Bf16(value);
    }
  }
  return tensor;
}

/// GFLOP/s of a product of square matrices.
double gemm_rate(DType dtype) {
  constexpr int64_t kSize = 1024;
  const OwnedTensor a = random_tensor({dtype, {kSize, kSize}});
  const OwnedTensor c(DType::kF32, {kSize, kSize});
  const double seconds = best_seconds([&] {
    gemm({.m = kSize,
          .n = kSize,
          .k = kSize,
          .a = a.get().data,
          .lda = kSize,
          .b = a.get().data,
          .ldb = kSize,
          .c = c.get().data,
          .ldc = kSize,
          .input_type = dtype,
          .output_type = DType::kF32});
  });
  return 2.0 * kSize * kSize * kSize / seconds / 1e9;
}

OwnedTensor sequence_ends() {
  OwnedTensor ends(DType::kI32, {kTokens / kSequence + 1});
  for (int64_t i = 0; i * kSequence <= kTokens; ++i) {
    ends.get().as<int32_t>()[i] = static_cast<int32_t>(i * kSequence);
  }
  return ends;
}

struct Run {
  double flops = 0;
  double seconds = 0;
  std::vector<OwnedTensor> outputs;
};

Run time_operator(const Operator& op, const std::vector<Tensor>& inputs) {
  KernelTable kernels;
  add_attention_cpu(kernels);
  std::vector<ValueType> types;
  for (const Tensor& input : inputs) types.push_back({input.dtype, input.shape});
  const std::vector<ValueType> output_types = op.infer(types);
  Run run{.flops = op.cost(types, output_types).flops, .seconds = 0, .outputs = {}};
  std::vector<Tensor> outputs;
  for (const ValueType& type : output_types) {
    run.outputs.emplace_back(type.dtype, type.shape);
    outputs.push_back(run.outputs.back());
  }
  const Kernel& kernel = kernels.find(op.name())->second;
  const Buffer workspace(kernel.workspace_bytes(op, types), "workspace");
  const KernelArgs args{inputs, outputs, workspace.bytes()};
  run.seconds = best_seconds([&] { kernel(op, args); });
  return run;
}

void print_rate(const AttentionSpec& spec, DType dtype, double peak) {
  const ValueType queries{dtype, {kTokens, spec.num_heads * spec.head_size}};
  const ValueType keys{dtype, {kTokens, spec.num_kv_heads * spec.head_size}};
  const OwnedTensor q = random_tensor(queries);
  const OwnedTensor k = random_tensor(keys);
  const OwnedTensor v = random_tensor(keys);
  const OwnedTensor grad_o = random_tensor(queries);
  const OwnedTensor ends = sequence_ends();
  const Run forward = time_operator(*make_attention(spec), {q, k, v, ends});
  const Run backward =
      time_operator(*make_attention_backward(spec, false),
                    {q, k, v, forward.outputs[0], forward.outputs[1], grad_o, ends});
  const auto share = [&](double flops, double seconds) { return flops / seconds / 1e7 / peak; };
  fmt::print(
      "{:>4}  heads {:>2}/{:<2} size {:>3}  forward {:7.1f} GFLOP/s {:5.1f} %  "
      "backward {:7.1f} GFLOP/s {:5.1f} %  both {:5.1f} %\n",
      dtype_name(dtype), spec.num_heads, spec.num_kv_heads, spec.head_size,
      forward.flops / forward.seconds / 1e9, share(forward.flops, forward.seconds),
      backward.flops / backward.seconds / 1e9, share(backward.flops, backward.seconds),
      share(forward.flops + backward.flops, forward.seconds + backward.seconds));
}

void run_all() {
  fmt::print("{} tokens in sequences of {}, {} threads; shares of the gemm rate\n", kTokens,
             kSequence, omp_get_max_threads());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const double peak = gemm_rate(dtype);
    fmt::print("{:>4}  gemm {:.1f} GFLOP/s\n", dtype_name(dtype), peak);
    for (const auto& [heads, kv_heads, size] :
         {std::array<int64_t, 3>{8, 8, 64}, {8, 2, 64}, {8, 8, 128}, {8, 2, 128}, {8, 8, 80}}) {
      AttentionSpec spec{.num_heads = heads, .num_kv_heads = kv_heads, .head_size = size};
      spec.sequence_length = kSequence;
      print_rate(spec, dtype, peak);
    }
  }
}

}  // namespace
}  // namespace tessera

int main() {
  tessera::run_all();
  return 0;
}
