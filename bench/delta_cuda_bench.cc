// Times the operators of a Gated DeltaNet layer on a GPU at the sizes of Qwen3-Next-80B-A3B, and
// those of Kimi Delta Attention at Kimi Linear's, with 4 sequences of 4096 tokens in BF16. For
// each: microseconds (median), the fewest bytes that it must move over the time as a share of what
// a copy reaches in the same run, its FLOPs over the time as a share of a BF16 product's, and the
// time of whichever binds over the time.
//   delta_cuda_bench [part of a name]
#include "operator_bench.h"
#include "ops/delta_gates/delta_gates.h"
#include "ops/gated_delta/gated_delta.h"
#include "ops/gated_norm/gated_norm.h"
#include "ops/kda/kda.h"
#include "ops/kda_gates/kda_gates.h"
#include "ops/short_conv/short_conv.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"

namespace {

using namespace tessera;

constexpr int64_t kSequences = 4;
constexpr int64_t kLength = 4096;
constexpr int64_t kTokens = kSequences * kLength;
constexpr GatedDeltaSpec kSpec{16, 32, 128, 128};
constexpr int64_t kKeys = kSpec.num_key_heads * kSpec.key_size;
constexpr int64_t kValues = kSpec.num_value_heads * kSpec.value_size;
constexpr int64_t kTaps = 4;

ValueType rows(int64_t width) {
  return {DType::kBF16, {kTokens, width}};
}

/// F32 [tokens, width] between two values.
OwnedTensor gates(const Gpu& gpu, float low, float high, int64_t width = kSpec.num_value_heads) {
  const Shape shape = {kTokens, width};
  OwnedTensor host(DType::kF32, shape);
  Random random(2, 0);
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    host.get().as<float>()[i] = low + (high - low) * static_cast<float>(random.next_uniform());
  OwnedTensor result = gpu.tensor({DType::kF32, shape});
  gpu.device().copy(result.get().data, host.get().data, host.get().num_bytes());
  return result;
}

void run_rule(const Gpu& gpu, const OperatorBench& bench, const Tensor& bounds) {
  const OwnedTensor q = gpu.random(rows(kKeys));
  const OwnedTensor k = gpu.random(rows(kKeys));
  const OwnedTensor v = gpu.random(rows(kValues));
  const OwnedTensor grad = gpu.random(rows(kValues));
  const OwnedTensor decay = gates(gpu, -0.2F, -0.001F);
  const OwnedTensor beta = gates(gpu, 0, 1);
  bench.run("gated_delta", make_gated_delta(kSpec), {q, k, v, decay, beta, bounds});
  bench.run("gated_delta_backward", std::make_shared<GatedDeltaBackward>(kSpec),
            {q, k, v, decay, beta, bounds, grad});
}

/// Kimi Linear's heads are as many as the value heads above.
void run_kimi(const Gpu& gpu, const OperatorBench& bench, const Tensor& bounds) {
  constexpr KdaSpec kKimi{32, 128, 128};
  constexpr int64_t kWidth = kKimi.num_heads * kKimi.key_size;
  std::vector<OwnedTensor> operands;
  for (int i = 0; i < 4; ++i) operands.push_back(gpu.random(rows(kWidth)));
  const OwnedTensor decay = gates(gpu, -0.2F, -0.001F, kWidth);
  const OwnedTensor beta = gates(gpu, 0, 1);
  const std::vector<Tensor> given = {operands[0], operands[1], operands[2], decay, beta, bounds};
  bench.run("kda", make_kda(kKimi), given);
  std::vector<Tensor> with_grad = given;
  with_grad.push_back(operands[3]);
  bench.run("kda_backward", std::make_shared<KdaBackward>(kKimi), with_grad);
  const OwnedTensor b = gpu.random(rows(kKimi.num_heads));
  const OwnedTensor log_decay = gpu.random({DType::kF32, {kKimi.num_heads}});
  const OwnedTensor bias = gpu.random({DType::kF32, {kWidth}});
  bench.run("kda_gates", make_kda_gates(), {operands[0], b, log_decay, bias});
  bench.run("kda_gates_backward", std::make_shared<KdaGatesBackward>(),
            {operands[0], b, log_decay, bias, decay, beta});
}

void run_others(const Gpu& gpu, const OperatorBench& bench, const Tensor& bounds) {
  const OwnedTensor x = gpu.random(rows(kValues));
  const OwnedTensor z = gpu.random(rows(kValues));
  const OwnedTensor grad = gpu.random(rows(kValues));
  const OwnedTensor taps = gpu.random({DType::kF32, {kValues, kTaps}});
  bench.run("short_conv", make_short_conv(), {x, taps, bounds});
  bench.run("short_conv_backward", std::make_shared<ShortConvBackward>(), {x, taps, bounds, grad});
  const OwnedTensor weight = gpu.random({DType::kF32, {kSpec.value_size}});
  bench.run("gated_norm", make_gated_norm(1e-6), {x, z, weight});
  bench.run("gated_norm_backward", std::make_shared<GatedNormBackward>(1e-6), {x, z, weight, grad});
  bench.run("sigmoid_gate", make_sigmoid_gate(), {x, z});
  bench.run("sigmoid_gate_backward", std::make_shared<SigmoidGateBackward>(), {x, z, grad});
  const OwnedTensor a = gpu.random(rows(kSpec.num_value_heads));
  const OwnedTensor b = gpu.random(rows(kSpec.num_value_heads));
  const ValueType per_head{DType::kF32, {kSpec.num_value_heads}};
  const OwnedTensor log_decay = gpu.random(per_head);
  const OwnedTensor bias = gpu.random(per_head);
  const OwnedTensor of_gates = gates(gpu, -1, 1);
  bench.run("delta_gates", make_delta_gates(), {a, b, log_decay, bias});
  bench.run("delta_gates_backward", std::make_shared<DeltaGatesBackward>(),
            {a, b, log_decay, bias, of_gates, of_gates});
}

}  // namespace

int main(int argc, char** argv) {
  const Gpu gpu;
  const OperatorBench bench(gpu, argc > 1 ? argv[1] : "");
  const OwnedTensor bounds = sequence_bounds(gpu, kSequences, kLength);
  run_rule(gpu, bench, bounds);
  run_kimi(gpu, bench, bounds);
  run_others(gpu, bench, bounds);
  return 0;
}
