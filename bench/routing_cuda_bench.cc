// Speed of the routed operators on a GPU, each from a cold L2: medians, and for those that only
// move rows the bandwidth as a share of a device-to-device copy's in the same run. Bytes are the
// fewest that must move: every row of tokens once, every routed row once.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>

#include "core/memory.h"
#include "core/random.h"
#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/permute/permute.h"
#include "ops/route_map/route_map.h"
#include "ops/router/router.h"
#include "runtime/cuda/cuda_backend.h"

namespace tessera {
namespace {

constexpr int kRepeats = 30;
constexpr int64_t kFlushBytes = int64_t{256} << 20;  // more than the L2 holds
constexpr int64_t kCopyBytes = int64_t{512} << 20;

struct Sizes {
  int64_t num_tokens;
  int64_t hidden;
  int64_t num_experts;
  int64_t top_k;
};

/// Times work on the GPU's stream.
class Timer {
 public:
  explicit Timer(const Backend& gpu)
      : device_(gpu.device()),
        stream_(static_cast<cuda::CudaContext*>(gpu.context())->stream()),
        flush_(kFlushBytes, "a cold cache", device_) {
    for (cudaEvent_t* event : {&begin_, &end_}) cuda::check(cudaEventCreate(event));
  }
  ~Timer() {
    for (const cudaEvent_t event : {begin_, end_}) cudaEventDestroy(event);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  /// The median in microseconds.
  template <typename Run>
  double median(const Run& run) const {
    std::vector<double> times;
    for (int i = 0; i < kRepeats; ++i) times.push_back(once(run));
    std::ranges::nth_element(times, times.begin() + kRepeats / 2);
    return times[kRepeats / 2];
  }
  cudaStream_t stream() const { return stream_; }

 private:
  template <typename Run>
  double once(const Run& run) const {
    cuda::check(cudaMemsetAsync(flush_.data(), 1, kFlushBytes, stream_));
    cuda::check(cudaEventRecord(begin_, stream_));
    run();
    cuda::check(cudaEventRecord(end_, stream_));
    cuda::check(cudaEventSynchronize(end_));
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return 1e3 * milliseconds;
  }

  Device& device_;
  cudaStream_t stream_;
  Buffer flush_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

/// An operator with memory for its outputs, the inputs' being given.
class Call {
 public:
  /// `extents` has where the extent of each ragged input is.
  Call(const Backend& gpu, OperatorPtr op, const std::vector<Tensor>& inputs,
       const std::vector<const int64_t*>& extents = {}, int own_extent = -1)
      : gpu_(gpu), op_(std::move(op)), inputs_(inputs), extents_(extents) {
    std::vector<ValueType> types;
    for (const Tensor& input : inputs) types.push_back({input.dtype, input.shape});
    extents_.resize(inputs.size(), nullptr);
    const int64_t bytes = gpu.workspace_bytes(*op_, types);
    workspace_ = Buffer(std::max<int64_t>(bytes, 1), "scratch", gpu.device());
    for (const ValueType& type : op_->infer(types)) {
      memory_.emplace_back(type.dtype, type.shape, "an output", gpu.device());
      outputs_.push_back(memory_.back());
    }
    const int64_t* extent = own_extent < 0 ? nullptr : out(own_extent).as<int64_t>();
    for (size_t i = 0; i < outputs_.size(); ++i) extents_.push_back(extent);
  }

  const Tensor& out(int idx) const { return outputs_[idx]; }
  void operator()() const {
    gpu_.kernel (*op_)(*op_, {.inputs = inputs_,
                              .outputs = outputs_,
                              .workspace = workspace_.bytes(),
                              .extents = extents_,
                              .context = gpu_.context()});
  }

 private:
  const Backend& gpu_;
  OperatorPtr op_;
  std::vector<Tensor> inputs_;
  std::vector<const int64_t*> extents_;
  Buffer workspace_;
  std::vector<OwnedTensor> memory_;
  std::vector<Tensor> outputs_;
};

/// Uniform in [-scale, scale].
OwnedTensor random_on(const Backend& gpu, DType dtype, const Shape& shape, float scale) {
  OwnedTensor host(dtype, shape);
  Random random(1, 1);
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    const float value = scale * static_cast<float>(2 * random.next_uniform() - 1);
    if (dtype == DType::kF32) {
      host.get().as<float>()[i] = value;
    } else {
      host.get().as<Bf16>()[i] = Bf16(value);
    }
  }
  OwnedTensor result(dtype, shape, "values", gpu.device());
  gpu.device().copy(result.get().data, host.get().data, host.get().num_bytes());
  return result;
}

void report(const std::string& what, double microseconds) {
  fmt::print("  {:30} {:9.1f} us\n", what, microseconds);
}
void report(const std::string& what, double microseconds, double bytes, double copy_rate) {
  const double rate = bytes / microseconds * 1e-3;
  fmt::print("  {:30} {:9.1f} us {:8.0f} GB/s {:6.1f} % of a copy\n", what, microseconds, rate,
             100 * rate / copy_rate);
}

/// GB/s read and written.
double copy_rate(const Backend& gpu, const Timer& timer) {
  const Buffer from(kCopyBytes, "a copy", gpu.device());
  const Buffer to(kCopyBytes, "a copy", gpu.device());
  const double microseconds = timer.median([&] {
    cuda::check(cudaMemcpyAsync(to.data(), from.data(), kCopyBytes, cudaMemcpyDeviceToDevice,
                                timer.stream()));
  });
  return 2.0 * static_cast<double>(kCopyBytes) / microseconds * 1e-3;
}

void run(const Backend& gpu, const Timer& timer, double rate, const Sizes& s) {
  fmt::print("T {} H {} E {} K {}, BF16\n", s.num_tokens, s.hidden, s.num_experts, s.top_k);
  const OwnedTensor x = random_on(gpu, DType::kBF16, {s.num_tokens, s.hidden}, 1.0F);
  const OwnedTensor weight = random_on(gpu, DType::kF32, {s.num_experts, s.hidden}, 0.05F);
  const RouterSpec spec{.num_experts = s.num_experts, .top_k = s.top_k, .normalize_top_k = true};
  const Call router(gpu, make_router(spec), {x, weight});
  report("router", timer.median(router));
  const Tensor probs = router.out(RouterOutput::kProbs);
  const Tensor expert_idx = router.out(RouterOutput::kExpertIdx);
  const OwnedTensor one = random_on(gpu, DType::kF32, {1}, 1.0F);
  const Call router_backward(
      gpu,
      std::make_shared<RouterBackward>(
          spec, RouterGradients{.probs = true, .balance_loss = true, .z_loss = true}),
      {x, weight, router.out(RouterOutput::kLogits), expert_idx, router.out(RouterOutput::kCounts),
       probs, one, one});
  report("router backward", timer.median(router_backward));

  RouteMapSpec map{.num_experts = s.num_experts, .top_k = s.top_k, .alignment = 16};
  constexpr int kExtent = RouteMapOutput::kExtent;
  const Call route_map(gpu, make_route_map(map), {expert_idx, probs}, {}, kExtent);
  report("route map", timer.median(route_map));
  map.capacity_factor = 1.0;
  const Call capacity_map(gpu, make_route_map(map), {expert_idx, probs}, {}, kExtent);
  report("route map, capacity 1.0", timer.median(capacity_map));

  const Tensor row_of = route_map.out(RouteMapOutput::kRowOfTK);
  const Tensor source = route_map.out(RouteMapOutput::kSourceR);
  const auto* extent = route_map.out(kExtent).as<int64_t>();
  int64_t num_rows = 0;
  gpu.device().copy(&num_rows, extent, sizeof(num_rows));
  const auto row_bytes = static_cast<double>(2 * s.hidden);
  const double token_bytes = static_cast<double>(s.num_tokens) * row_bytes;
  const double routed_bytes = static_cast<double>(num_rows) * row_bytes;
  const double map_bytes = static_cast<double>(row_of.num_bytes());

  Call permute(gpu, make_permute(), {x, source, row_of}, {nullptr, extent, nullptr});
  report("permute", timer.median(permute), token_bytes + routed_bytes + map_bytes, rate);
  const Tensor rows = permute.out(0);
  const Call unpermute(gpu, make_unpermute(), {rows, row_of, source}, {extent, nullptr, extent});
  report("unpermute", timer.median(unpermute), token_bytes + routed_bytes + map_bytes, rate);
  const Call weighted(gpu, make_unpermute_weighted(), {rows, probs, row_of, source},
                      {extent, nullptr, nullptr, extent});
  report("unpermute weighted", timer.median(weighted), token_bytes + routed_bytes + 2 * map_bytes,
         rate);
  const Call backward(gpu, std::make_shared<UnpermuteWeightedBackward>(), {x, rows, probs, source},
                      {nullptr, extent, nullptr, extent});
  report("unpermute weighted, backward", timer.median(backward),
         token_bytes + 2 * routed_bytes + 3 * map_bytes, rate);
  const Call permute_probs(gpu, make_permute_probs(), {probs, source, row_of},
                           {nullptr, extent, nullptr});
  report("permute probabilities", timer.median(permute_probs));
}

}  // namespace
}  // namespace tessera

int main() {
  const tessera::Backend gpu = tessera::make_cuda_backend(0);
  const tessera::Timer timer(gpu);
  const double rate = tessera::copy_rate(gpu, timer);
  fmt::print("copy: {:.0f} GB/s, read and written\n", rate);
  tessera::run(gpu, timer, rate, {16384, 2048, 128, 8});
  tessera::run(gpu, timer, rate, {32768, 1536, 128, 8});  // fine-grained
  tessera::run(gpu, timer, rate, {16384, 4096, 8, 2});
  return 0;
}
