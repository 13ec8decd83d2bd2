// Attention on a GPU, forward and backward apart: medians of model TFLOPS (see AttentionOperator),
// one JSON line a shape and way of running: our own kernels, or cuDNN's, whose backward is not
// deterministic; and attention to chosen rows. An argument picks shapes by a part of their names.
// bench/rivals/attention_torch.py measures PyTorch on the
// same shapes and merges.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/random.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/cuda/device_buffer.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "runtime/cuda/cuda_backend.h"

namespace tessera {
namespace {

constexpr int kWarmups = 3;
constexpr int kRepeats = 15;

struct Problem {
  std::string name;
  int64_t batch;
  int64_t length;
  AttentionSpec spec;
  DType dtype = DType::kBF16;
  bool shares_keys = false;  ///< with the values
};

/// Attention to chosen rows: the last `window` tokens and the entries before, one of each `rate`
/// tokens; without a window so many tokens before, as evenly as there are.
struct SparseProblem {
  std::string name;
  int64_t num_tokens;
  AttentionSpec spec;
  int64_t top_k;
  SparseSight sight;
};

std::vector<Problem> shapes() {
  const auto spec = [](int64_t heads, int64_t kv_heads, int64_t size, int64_t size_v = 0) {
    return AttentionSpec{
        .num_heads = heads, .num_kv_heads = kv_heads, .head_size = size, .head_size_v = size_v};
  };
  return {{"qwen3-30b-a3b 4x4096", 4, 4096, spec(32, 4, 128)},
          {"mixtral 2x4096", 2, 4096, spec(32, 8, 128)},
          {"mixtral 1x16384", 1, 16384, spec(32, 8, 128)},
          {"mla 1x4096", 1, 4096, spec(128, 128, 192, 128)},
          {"d64 4x4096", 4, 4096, spec(32, 8, 64)},
          {"qwen3-next 4x4096", 4, 4096, spec(16, 2, 256)},
          {"gemma-4 global 4x4096", 4, 4096, spec(16, 2, 512)},
          {"deepseek-v4 window 1x4096",
           1,
           4096,
           {.num_heads = 64, .num_kv_heads = 1, .head_size = 512, .window = 128},
           DType::kBF16,
           true},
          {"qwen3-30b-a3b 1x2048 f32", 1, 2048, spec(32, 4, 128), DType::kF32}};
}

std::vector<SparseProblem> sparse_shapes() {
  const AttentionSpec v4{.num_heads = 64, .num_kv_heads = 1, .head_size = 512, .head_size_v = 512};
  const AttentionSpec v3{.num_heads = 128, .num_kv_heads = 1, .head_size = 576, .head_size_v = 512};
  return {
      {"deepseek-v4 heavy 1x4096", 4096, v4, 128 + 32, {.window = 128, .rate = 128, .entries = 32}},
      {"deepseek-v4 sparse 1x4096",
       4096,
       v4,
       128 + 512,
       {.window = 128, .rate = 4, .entries = 512}},
      {"deepseek-v3.2 1x4096", 4096, v3, 2048, {}}};
}

/// A tensor in the GPU's memory.
struct GpuTensor {
  cuda::DeviceBuffer memory;
  Tensor view;

  explicit GpuTensor(const ValueType& type)
      : memory(type.num_bytes()), view{memory.as<void>(), type.dtype, type.shape} {}
};

GpuTensor random_tensor(const ValueType& type, uint64_t seed) {
  GpuTensor tensor(type);
  constexpr int64_t kDistinct = 1 << 20;
  std::vector<std::byte> host(tensor.memory.num_bytes());
  std::vector<float> values(kDistinct);
  Random random(seed, 1);
  for (float& value : values) value = static_cast<float>(3.46 * (random.next_uniform() - 0.5));
  for (int64_t i = 0; i < type.shape.num_elements(); ++i) {
    // The second term keeps rows apart that are kDistinct values from each other.
    const float value = values[(i + i / kDistinct * 12347) % kDistinct];
    if (type.dtype == DType::kF32) {
      reinterpret_cast<float*>(host.data())[i] = value;
    } else {
      reinterpret_cast<Bf16*>(host.data())[i] = Bf16(value);
    }
  }
  tensor.memory.copy_from(host.data());
  return tensor;
}

GpuTensor sequence_ends(const Problem& shape) {
  GpuTensor ends({DType::kI32, {shape.batch + 1}});
  std::vector<int32_t> host;
  for (int64_t i = 0; i <= shape.batch; ++i) host.push_back(static_cast<int32_t>(i * shape.length));
  ends.memory.copy_from(host.data());
  return ends;
}

int64_t num_rows(const SparseProblem& shape) {
  return shape.num_tokens + (shape.sight.window > 0 ? shape.num_tokens / shape.sight.rate : 0);
}

GpuTensor choice_of(const SparseProblem& shape) {
  GpuTensor chosen({DType::kI32, {shape.num_tokens, shape.top_k}});
  std::vector<int32_t> host;
  for (int64_t token = 0; token < shape.num_tokens; ++token) {
    std::vector<int64_t> own;
    const SparseSight& sight = shape.sight;
    if (sight.window == 0) {
      const int64_t count = std::min(token + 1, shape.top_k);
      for (int64_t i = 0; i < count; ++i) own.push_back(i * (token + 1) / count);
    } else {
      for (int64_t row = std::max<int64_t>(0, token - sight.window + 1); row <= token; ++row)
        own.push_back(row);
      const int64_t entries = (token + 1) / sight.rate;
      const int64_t count = std::min(entries, sight.entries);
      for (int64_t i = 0; i < count; ++i) own.push_back(shape.num_tokens + i * entries / count);
    }
    own.resize(shape.top_k, -1);
    host.insert(host.end(), own.begin(), own.end());
  }
  chosen.memory.copy_from(host.data());
  return chosen;
}

double median_ms(cudaStream_t stream, const std::function<void()>& run) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cuda::check(cudaEventCreate(&begin));
  cuda::check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kWarmups + kRepeats; ++i) {
    cuda::check(cudaEventRecord(begin, stream));
    run();
    cuda::check(cudaEventRecord(end, stream));
    cuda::check(cudaEventSynchronize(end));
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= kWarmups) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::ranges::sort(times);
  return times[kRepeats / 2];
}

struct Timed {
  std::vector<GpuTensor> outputs;
  double tflops = 0;
};

Timed time_operator(const Backend& backend, const Operator& op, const std::vector<Tensor>& inputs) {
  std::vector<ValueType> types;
  for (const Tensor& input : inputs) types.push_back({input.dtype, input.shape});
  const std::vector<ValueType> output_types = op.infer(types);
  Timed timed;
  std::vector<Tensor> outputs;
  for (const ValueType& type : output_types) {
    timed.outputs.emplace_back(type);
    outputs.push_back(timed.outputs.back().view);
  }
  const int64_t bytes = backend.workspace_bytes(op, types);
  const cuda::DeviceBuffer workspace(bytes);
  const std::vector<const int64_t*> extents(inputs.size() + outputs.size());
  const KernelArgs args{.inputs = inputs,
                        .outputs = outputs,
                        .workspace = {workspace.as<std::byte>(), static_cast<size_t>(bytes)},
                        .extents = extents,
                        .context = backend.context()};
  const Kernel& kernel = backend.kernel(op);
  const double ms = median_ms(cuda::stream_of(args), [&] { kernel(op, args); });
  timed.tflops = op.cost(types, output_types).flops / ms / 1e9;
  return timed;
}

void measure(const Backend& backend, const Problem& shape, bool cudnn) {
  auto& context = static_cast<cuda::CudaContext&>(*backend.context());
  auto& options = context.get<cuda::AttentionOptions>();
  options = cuda::AttentionOptions(context);
  options.cudnn = cudnn;
  options.deterministic = false;
  AttentionSpec spec = shape.spec;
  spec.sequence_length = shape.length;
  const OperatorPtr forward_op = make_attention(spec);
  spec = static_cast<const Attention&>(*forward_op).spec();
  const int64_t tokens = shape.batch * shape.length;
  const GpuTensor q = random_tensor({shape.dtype, {tokens, spec.num_heads * spec.head_size}}, 1);
  const GpuTensor k = random_tensor({shape.dtype, {tokens, spec.num_kv_heads * spec.head_size}}, 2);
  const GpuTensor own_v =
      random_tensor({shape.dtype, {tokens, spec.num_kv_heads * spec.head_size_v}}, 3);
  const GpuTensor& v = shape.shares_keys ? k : own_v;
  const GpuTensor grad_o =
      random_tensor({shape.dtype, {tokens, spec.num_heads * spec.head_size_v}}, 4);
  const GpuTensor ends = sequence_ends(shape);
  const Timed forward = time_operator(backend, *forward_op, {q.view, k.view, v.view, ends.view});
  const Timed backward = time_operator(backend, *make_attention_backward(spec, false),
                                       {q.view, k.view, v.view, forward.outputs[0].view,
                                        forward.outputs[1].view, grad_o.view, ends.view});
  if (!options.why_not_cudnn.empty()) {
    fmt::print(stderr, "{}: no cuDNN: {}\n", shape.name, options.why_not_cudnn);
    return;
  }
  fmt::print("{{\"shape\": \"{}\", \"who\": \"{}\", \"forward\": {:.1f}, \"backward\": {:.1f}}}\n",
             shape.name, cudnn ? "cudnn" : "own", forward.tflops, backward.tflops);
  std::fflush(stdout);
}

void measure_sparse(const Backend& backend, const SparseProblem& shape) {
  const OperatorPtr forward_op = make_sparse_attention(shape.spec, shape.sight);
  const AttentionSpec& spec = static_cast<const AttentionOperator&>(*forward_op).spec();
  const int64_t tokens = shape.num_tokens;
  const int64_t rows = num_rows(shape);
  const DType dtype = DType::kBF16;
  const GpuTensor q = random_tensor({dtype, {tokens, spec.num_heads * spec.head_size}}, 1);
  const GpuTensor k = random_tensor({dtype, {rows, spec.num_kv_heads * spec.head_size}}, 2);
  const GpuTensor own_v = random_tensor({dtype, {rows, spec.num_kv_heads * spec.head_size_v}}, 3);
  const GpuTensor& v = spec.head_size == spec.head_size_v ? k : own_v;
  const GpuTensor grad_o = random_tensor({dtype, {tokens, spec.num_heads * spec.head_size_v}}, 4);
  const GpuTensor chosen = choice_of(shape);
  const Timed forward = time_operator(backend, *forward_op, {q.view, k.view, v.view, chosen.view});
  const SparseAttentionBackward backward_op(spec, false, shape.sight);
  const Timed backward = time_operator(backend, backward_op,
                                       {q.view, k.view, v.view, forward.outputs[0].view,
                                        forward.outputs[1].view, grad_o.view, chosen.view});
  fmt::print("{{\"shape\": \"{}\", \"who\": \"own\", \"forward\": {:.1f}, \"backward\": {:.1f}}}\n",
             shape.name, forward.tflops, backward.tflops);
  std::fflush(stdout);
}

/// Those whose names have `part`.
int run_all(const std::string& part) {
  const GpuList list = list_gpus();
  if (list.gpus.empty()) {
    fmt::print("no GPU: {}\n", list.why);
    return 1;
  }
  const Backend backend = make_cuda_backend(0);
  for (const SparseProblem& shape : sparse_shapes()) {
    if (shape.name.find(part) != std::string::npos) measure_sparse(backend, shape);
  }
  for (const bool cudnn : {false, true}) {
    for (const Problem& shape : shapes()) {
      if (shape.name.find(part) == std::string::npos) continue;
      if (!cudnn || shape.dtype == DType::kBF16) measure(backend, shape, cudnn);
    }
  }
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::run_all(argc > 1 ? argv[1] : "");
}
