// Times the memory-bound kernels on a GPU at the sizes of a training step of Qwen3-30B-A3B with
// 16,384 tokens. For each: microseconds (median), GB/s of the fewest bytes that its operator must
// move, and that as a share of what a copy within the GPU's memory reaches in the same run: a copy
// of 512 MiB, and one of as many bytes. The second is the ceiling of small tensors, of which
// starting and ending a kernel is a part that no kernel can avoid. Calls rotate over several sets
// of tensors, so that none finds its data in the cache.
//   elementwise_cuda_bench [part of a name]
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/memory.h"
#include "core/random.h"
#include "ops/activation/activation.h"
#include "ops/adamw/adamw.h"
#include "ops/add/add.h"
#include "ops/add_bias/add_bias.h"
#include "ops/attention_sink/attention_sink.h"
#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/embedding/embedding.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/expert_bias/expert_bias.h"
#include "ops/grad_norm/grad_norm.h"
#include "ops/latent_heads/latent_heads.h"
#include "ops/norm_rope/norm_rope.h"
#include "ops/repeat_heads/repeat_heads.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"
#include "ops/scale/scale.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "runtime/cuda/cuda_backend.h"

namespace {

using namespace tessera;

constexpr int64_t kTokens = 16384;
constexpr int64_t kHidden = 2048;
constexpr int64_t kVocab = 32768;
constexpr int64_t kExperts = 128;
constexpr int64_t kRoutedRows = 8 * kTokens;
constexpr int64_t kExpertSize = 768;
constexpr int64_t kHeads = 32;
constexpr int64_t kKeyHeads = 4;
constexpr int64_t kHeadSize = 128;
constexpr int64_t kParameters = 200'000'000;
constexpr int64_t kManyBytes = int64_t{1} << 30;
constexpr int64_t kPage = 4096;
constexpr int kRepeats = 9;
constexpr DType kA = DType::kBF16;

struct Case {
  std::string name;
  OperatorPtr op;
  std::vector<ValueType> inputs;
  double bytes;
};

double bytes_of(std::span<const ValueType> types) {
  double total = 0;
  for (const ValueType& type : types) total += static_cast<double>(type.num_bytes());
  return total;
}

/// What goes in and out, each once; accumulators are read and written.
double fewest_bytes(const Operator& op, const std::vector<ValueType>& inputs) {
  const std::vector<ValueType> outputs = op.infer(inputs);
  double total = bytes_of(inputs) + bytes_of(outputs);
  for (int i = 0; i < std::ssize(outputs); ++i)
    if (op.accumulates(i)) total += static_cast<double>(outputs[i].num_bytes());
  return total;
}

Case plain(std::string name, OperatorPtr op, std::vector<ValueType> inputs) {
  const double bytes = fewest_bytes(*op, inputs);
  return {std::move(name), std::move(op), std::move(inputs), bytes};
}

/// Tokens by Zipf's law, as words of a text are: the n-th most frequent 1/n as often as the first.
std::vector<int32_t> text_tokens() {
  std::vector<double> ends;
  double total = 0;
  for (int64_t n = 1; n <= kVocab; ++n) ends.push_back(total += 1.0 / static_cast<double>(n));
  Random random(1, 1);
  std::vector<int32_t> tokens;
  for (int64_t t = 0; t < kTokens; ++t)
    tokens.push_back(static_cast<int32_t>(
        std::ranges::lower_bound(ends, random.next_uniform() * total) - ends.begin()));
  return tokens;
}

double distinct(std::vector<int32_t> tokens) {
  std::ranges::sort(tokens);
  return static_cast<double>(std::unique(tokens.begin(), tokens.end()) - tokens.begin());
}

ValueType rows(int64_t count, int64_t width) {
  return {kA, {count, width}};
}

using Cases = std::vector<Case>;

void add(Cases& cases, std::string name, OperatorPtr op, std::vector<ValueType> inputs) {
  cases.push_back(plain(std::move(name), std::move(op), std::move(inputs)));
}

const ValueType kStates = rows(kTokens, kHidden);
const ValueType kQueries = rows(kTokens, kHeads* kHeadSize);
const ValueType kKeys = rows(kTokens, kKeyHeads* kHeadSize);
const ValueType kPositions{DType::kI32, {kTokens}};

void add_norms(Cases& cases) {
  const ValueType weight{DType::kF32, {kHidden}};
  const ValueType head_weight{DType::kF32, {kHeadSize}};
  const ValueType statistics{DType::kF32, {kTokens}};
  const auto norm = make_rmsnorm(1e-6);
  const auto norm_backward = std::make_shared<RmsNormBackward>();
  add(cases, "rmsnorm", norm, {kStates, weight});
  add(cases, "rmsnorm_backward", norm_backward, {kStates, weight, statistics, kStates});
  add(cases, "rmsnorm_backward with addend", std::make_shared<RmsNormBackward>(true),
      {kStates, weight, statistics, kStates, kStates});
  add(cases, "rmsnorm of query heads", norm, {kQueries, head_weight});
  add(cases, "rmsnorm_backward of query heads", norm_backward,
      {kQueries, head_weight, {DType::kF32, {kTokens, kHeads}}, kQueries});
  add(cases, "add", make_add(), {kStates, kStates});
  add(cases, "scale", make_scale(0.22), {kStates});
  add(cases, "scale and add", std::make_shared<Scale>(0.22, true), {kStates, kStates});
  add(cases, "add_bias", make_add_bias(), {kStates, weight});
  add(cases, "add_bias_grad", std::make_shared<AddBiasGrad>(), {kStates});
}

void add_rotations(Cases& cases, const std::string& name, const ValueType& type, int64_t heads) {
  const ValueType weight{DType::kF32, {kHeadSize}};
  const RotarySpec spec = {.num_heads = heads,
                           .head_size = kHeadSize,
                           .inverse_frequencies = default_inverse_frequencies(kHeadSize, 1e6)};
  add(cases, "rope of " + name, make_rope(spec), {type, kPositions});
  add(cases, "rope_backward of " + name, std::make_shared<Rope>(spec, true), {type, kPositions});
  add(cases, "norm_rope of " + name, make_norm_rope(1e-6, spec), {type, weight, kPositions});
  add(cases, "norm_rope_backward of " + name, std::make_shared<NormRopeBackward>(spec),
      {type, weight, kPositions, {DType::kF32, {kTokens, heads}}, type});
}

void add_sinks(Cases& cases) {
  const AttentionSink sink({.num_heads = kHeads, .num_sinks = kHeads});
  const ValueType lse{DType::kF32, {kHeads, kTokens}};
  const ValueType sinks{DType::kF32, {kHeads}};
  add(cases, "attention_sink", std::make_shared<AttentionSink>(sink), {kQueries, lse, sinks});
  add(cases, "attention_sink_backward", std::make_shared<AttentionSinkBackward>(sink),
      {kQueries, kQueries, lse, sinks});
}

/// As attention takes them.
void add_rotations_of_both(Cases& cases) {
  const RotarySpec spec = {.num_heads = kHeads,
                           .head_size = kHeadSize,
                           .inverse_frequencies = default_inverse_frequencies(kHeadSize, 1e6)};
  for (const bool inverse : {false, true}) {
    const auto op = std::make_shared<Rope>(spec, inverse, kKeyHeads);
    add(cases, fmt::format("{} of queries and keys", op->name()), op,
        {kQueries, kKeys, kPositions});
  }
}

void add_activations(Cases& cases) {
  for (const Activation kind : {Activation::kSwiGLU, Activation::kGeGLU}) {
    add(cases, fmt::format("activation {}", activation_name(kind)), make_activation(kind),
        {rows(kTokens, 2 * 6144)});
    add(cases, fmt::format("activation_backward {}", activation_name(kind)),
        std::make_shared<ActivationBackward>(kind), {rows(kTokens, 2 * 6144), rows(kTokens, 6144)});
  }
  const ExpertActivation experts({.function = Activation::kSwiGLU,
                                  .expert_sizes = std::vector<int64_t>(kExperts, kExpertSize),
                                  .apply_prob = true});
  const ValueType pre = rows(kRoutedRows, 2 * kExpertSize);
  const ValueType probs{DType::kF32, {kRoutedRows}};
  const ValueType offsets{DType::kI64, {kExperts + 1}};
  add(cases, "expert_activation", std::make_shared<ExpertActivation>(experts),
      {pre, probs, offsets});
  add(cases, "expert_activation_backward", std::make_shared<ExpertActivationBackward>(experts),
      {rows(kRoutedRows, kExpertSize), pre, probs, offsets});
  add(cases, "expert_activation_backward and act",
      std::make_shared<ExpertActivationBackward>(experts, true),
      {rows(kRoutedRows, kExpertSize), pre, probs, offsets});
  const ExpertBias bias({.sizes = std::vector<int64_t>(kExperts, 2 * kExpertSize)});
  add(cases, "expert_bias", std::make_shared<ExpertBias>(bias), {pre, bias.bias_type(), offsets});
  add(cases, "expert_bias_backward", std::make_shared<ExpertBiasBackward>(bias), {pre, offsets});
  const ValueType logit = rows(kTokens, 1);
  add(cases, "sigmoid_gate", make_sigmoid_gate(), {kStates, logit});
  add(cases, "sigmoid_gate_backward", std::make_shared<SigmoidGateBackward>(),
      {kStates, logit, kStates});
}

void add_embeddings(Cases& cases) {
  const double row_bytes = kHidden * 2.0;
  const double found = distinct(text_tokens());
  cases.push_back({"embedding",
                   make_embedding(),
                   {kPositions, rows(kVocab, kHidden)},
                   kTokens * (4.0 + row_bytes) + found * row_bytes});
  cases.push_back({"embedding_backward",
                   std::make_shared<EmbeddingBackward>(kVocab, EmbeddingSpec{}),
                   {kPositions, kStates},
                   kTokens * (4.0 + row_bytes) + 2 * found * kHidden * 4.0});
}

void add_heads(Cases& cases) {
  const LatentHeadsSpec latent = {
      .num_heads = 16, .nope_size = 128, .rope_size = 64, .value_size = 128};
  add(cases, "latent_heads", make_latent_heads(latent),
      {rows(kTokens, 16 * 256), rows(kTokens, 64)});
  add(cases, "latent_heads_backward", std::make_shared<LatentHeadsBackward>(latent),
      {rows(kTokens, 16 * 192), rows(kTokens, 16 * 128)});
  add(cases, "repeat_heads", make_repeat_heads(kKeyHeads, 8), {kKeys});
  add(cases, "sum_heads", make_sum_heads(kKeyHeads, 8), {kQueries});
}

void add_optimizer(Cases& cases) {
  cases.push_back({"adamw",
                   make_adamw({.bf16_weight = true}),
                   {{DType::kF32, {kParameters}}, {DType::kF32, {8}}, {DType::kF32, {2}}},
                   kParameters * (7 * 4.0 + 2.0)});
  for (const MomentKind kind : {MomentKind::kFp8, MomentKind::kF16}) {
    const auto size = static_cast<double>(dtype_size(moment_dtype(kind)));
    const StateFormats formats = {kind, kind, MasterKind::kRemainder8};
    // A gradient, both moments with a scale for 128 elements, and weight and remainder.
    cases.push_back(
        {fmt::format("adamw, moments in {}", moment_name(kind)),
         make_adamw({.bf16_weight = true, .formats = formats}),
         {{DType::kF32, {kParameters / 512, 512}}, {DType::kF32, {8}}, {DType::kF32, {2}}},
         kParameters * (4.0 + 2 * (2 * size + 2.0 / 128 + 3))});
  }
  add(cases, "sum_of_squares", make_sum_of_squares(), {{DType::kF32, {kParameters}}});
}

Cases make_cases() {
  Cases cases;
  add_norms(cases);
  add_rotations(cases, "queries", kQueries, kHeads);
  add_rotations(cases, "keys", kKeys, kKeyHeads);
  add_rotations_of_both(cases);
  add_sinks(cases);
  add_activations(cases);
  add_embeddings(cases);
  add_heads(cases);
  add_optimizer(cases);
  return cases;
}

/// Runs `call(i)` for i = 0, 1, ... and returns the median seconds of one.
double time_calls(cudaStream_t stream, int calls, const std::function<void(int)>& call) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cuda::check(cudaEventCreate(&begin));
  cuda::check(cudaEventCreate(&end));
  for (int i = 0; i < calls; ++i) call(i);
  std::vector<double> seconds;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    cuda::check(cudaEventRecord(begin, stream));
    for (int i = 0; i < calls; ++i) call(i);
    cuda::check(cudaEventRecord(end, stream));
    cuda::check(cudaEventSynchronize(end));
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, begin, end));
    seconds.push_back(milliseconds * 1e-3 / calls);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::ranges::nth_element(seconds, seconds.begin() + kRepeats / 2);
  return seconds[kRepeats / 2];
}

class Bench {
 public:
  Bench()
      : backend_(make_cuda_backend(0)),
        stream_(static_cast<cuda::CudaContext*>(backend_.context())->stream()),
        numbers_(1 << 22),
        factors_(make_adamw_factors({}, 1e-3, 10)) {
    fill_normal(numbers_, 1, 1, 1.0F);
    for (const float number : numbers_) halves_.emplace_back(number);
    copy_bandwidth_ = measure_copy();
    fmt::print("copy within the GPU's memory: {:.0f} GB/s read and written\n",
               copy_bandwidth_ * 1e-9);
    fmt::print("{:34} {:>9} {:>8} {:>9} {:>27}\n", "", "us", "GB/s", "of a copy",
               "of a copy of as many bytes");
  }

  void run(const Case& c) const {
    const int sets = c.bytes > kManyBytes ? 1 : 4;
    const int calls = c.bytes > kManyBytes ? 4 : 24;
    std::vector<std::vector<OwnedTensor>> kept(sets);
    std::vector<std::vector<Tensor>> inputs(sets);
    std::vector<std::vector<Tensor>> outputs(sets);
    for (size_t set = 0; set < static_cast<size_t>(sets); ++set) {
      for (const ValueType& type : c.inputs) {
        kept[set].push_back(make_input(*c.op, type));
        inputs[set].push_back(kept[set].back());
      }
      if (c.op->name() == "adamw") {
        backend_.device().copy(inputs[set][1].data, &factors_, sizeof(factors_));
        backend_.device().copy(inputs[set][2].data, &grad_scale_, sizeof(grad_scale_));
      }
      for (const ValueType& type : c.op->infer(c.inputs)) {
        kept[set].emplace_back(type.dtype, type.shape, "results", backend_.device());
        outputs[set].push_back(kept[set].back());
      }
    }
    const int64_t scratch = std::max<int64_t>(backend_.workspace_bytes(*c.op, c.inputs), 1);
    const Buffer workspace(scratch, "scratch memory", backend_.device());
    const std::vector<const int64_t*> extents(inputs[0].size() + outputs[0].size(), nullptr);
    const Kernel& kernel = backend_.kernel(*c.op);
    const double seconds = time_calls(stream_, calls, [&](int i) {
      const size_t set = i % sets;
      kernel(*c.op, {.inputs = inputs[set],
                     .outputs = outputs[set],
                     .workspace = {workspace.data(), static_cast<size_t>(scratch)},
                     .extents = extents,
                     .context = backend_.context()});
    });
    const double bandwidth = c.bytes / seconds;
    // Copies of other sizes than whole pages take a second kernel for what is left.
    const auto pages = static_cast<int64_t>(std::round(c.bytes / (2 * kPage)));
    const double copy_seconds = time_copies(std::max<int64_t>(pages, 1) * kPage, sets, calls);
    fmt::print("{:34} {:9.1f} {:8.0f} {:7.1f} % {:25.1f} %\n", c.name, seconds * 1e6,
               bandwidth * 1e-9, 100 * bandwidth / copy_bandwidth_, 100 * copy_seconds / seconds);
  }

 private:
  double measure_copy() const {
    const int64_t bytes = int64_t{1} << 29;
    return 2.0 * static_cast<double>(bytes) / time_copies(bytes, 1, 8);
  }

  /// Of a copy that reads and writes `bytes` each, alternating between `sets` pairs of places.
  double time_copies(int64_t bytes, int sets, int calls) const {
    std::vector<Buffer> places;
    for (int i = 0; i < 2 * sets; ++i) places.emplace_back(bytes, "a copy", backend_.device());
    return time_calls(stream_, calls, [&](int i) {
      const size_t from = 2 * (i % sets);
      cuda::check(cudaMemcpyAsync(places[from + 1].data(), places[from].data(), bytes,
                                  cudaMemcpyDeviceToDevice, stream_));
    });
  }

  OwnedTensor make_input(const Operator& op, const ValueType& type) const {
    OwnedTensor tensor(type.dtype, type.shape, "an input", backend_.device());
    if (type.dtype == DType::kI64) {
      fill_offsets(tensor);
    } else if (type.dtype == DType::kI32) {
      op.name().starts_with("embedding") ? fill(tensor, text_tokens())
                                         : fill(tensor, count_positions());
    } else if (type.dtype == DType::kF32) {
      fill(tensor, numbers_);
    } else {
      fill(tensor, halves_);
    }
    return tensor;
  }
  static std::vector<int32_t> count_positions() {
    std::vector<int32_t> positions;
    for (int64_t t = 0; t < kTokens; ++t) positions.push_back(static_cast<int32_t>(t % 4096));
    return positions;
  }
  void fill_offsets(const Tensor& tensor) const {
    std::vector<int64_t> offsets;
    for (int64_t e = 0; e <= kExperts; ++e) offsets.push_back(e * kRoutedRows / kExperts);
    fill(tensor, offsets);
  }
  /// With the values, again and again.
  template <typename T>
  void fill(const Tensor& tensor, const std::vector<T>& values) const {
    const auto size = static_cast<int64_t>(values.size());
    for (int64_t at = 0; at < tensor.num_elements(); at += size) {
      const int64_t count = std::min(size, tensor.num_elements() - at);
      backend_.device().copy(tensor.as<T>() + at, values.data(),
                             count * static_cast<int64_t>(sizeof(T)));
    }
  }

  Backend backend_;
  cudaStream_t stream_;
  std::vector<float> numbers_;
  std::vector<Bf16> halves_;
  AdamWFactors factors_;
  AdamWGradScale grad_scale_{1, 0};
  double copy_bandwidth_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string_view wanted = argc > 1 ? argv[1] : "";
    const Bench bench;
    for (const Case& c : make_cases())
      if (c.name.find(wanted) != std::string::npos) bench.run(c);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
