#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "core/memory.h"
#include "core/random.h"
#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/linear/linear.h"
#include "runtime/cuda/cuda_backend.h"

/// Timing of operators on one GPU, for benchmarks: medians, each with a cold L2 cache.
namespace tessera {

constexpr int kRepeats = 15;
constexpr int64_t kFlushBytes = int64_t{256} << 20;

class Event {
 public:
  Event() { cuda::check(cudaEventCreate(&event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// The GPU, and how work on it is timed.
class Gpu {
 public:
  Gpu() : backend_(make_cuda_backend(0)), flush_(kFlushBytes, "the flush", backend_.device()) {}

  const Backend& backend() const { return backend_; }
  Device& device() const { return backend_.device(); }
  cuda::CudaContext& context() const {
    return static_cast<cuda::CudaContext&>(*backend_.context());
  }

  double median_seconds(const std::function<void()>& work) const {
    return median_seconds(std::vector{work})[0];
  }
  /// Of several pieces of work, one after the other again and again: power and heat, which set the
  /// clock, are then alike for all.
  std::vector<double> median_seconds(const std::vector<std::function<void()>>& works) const {
    std::vector<std::vector<float>> times(works.size());
    for (int i = -1; i < kRepeats; ++i) {
      for (size_t w = 0; w < works.size(); ++w) {
        const float time = milliseconds(works[w]);
        if (i >= 0) times[w].push_back(time);
      }
    }
    std::vector<double> medians;
    for (std::vector<float>& of_work : times) {
      std::ranges::nth_element(of_work, of_work.begin() + kRepeats / 2);
      medians.push_back(of_work[kRepeats / 2] * 1e-3);
    }
    return medians;
  }

  OwnedTensor tensor(const ValueType& type) const {
    return {type.dtype, type.shape, "a tensor", device()};
  }
  /// Filled with values between -1 and 1; their number is prime, so that rows differ.
  OwnedTensor random(const ValueType& type) const {
    constexpr int64_t kCount = 1'000'003;
    OwnedTensor pattern(type.dtype, {kCount});
    Random random(1, 1);
    for (int64_t i = 0; i < kCount; ++i) {
      const auto value = static_cast<float>(2 * random.next_uniform() - 1);
      if (type.dtype == DType::kBF16) {
        pattern.get().as<Bf16>()[i] = Bf16(value);
      } else {
        pattern.get().as<float>()[i] = value;
      }
    }
    OwnedTensor result = tensor(type);
    const int64_t pattern_bytes = pattern.get().num_bytes();
    for (int64_t at = 0; at < type.num_bytes(); at += pattern_bytes) {
      device().copy(static_cast<std::byte*>(result.get().data) + at, pattern.get().data,
                    std::min(pattern_bytes, type.num_bytes() - at));
    }
    return result;
  }

 private:
  float milliseconds(const std::function<void()>& work) const {
    const Event begin;
    const Event end;
    device().zero(flush_.data(), kFlushBytes);
    cuda::check(cudaEventRecord(begin.get(), context().stream()));
    work();
    cuda::check(cudaEventRecord(end.get(), context().stream()));
    device().synchronize();
    float taken = 0;
    cuda::check(cudaEventElapsedTime(&taken, begin.get(), end.get()));
    return taken;
  }

  Backend backend_;
  Buffer flush_;
};

/// An operator with memory for its outputs and scratch.
class Call {
 public:
  Call(const Gpu& gpu, OperatorPtr op, std::vector<Tensor> inputs)
      : gpu_(gpu), op_(std::move(op)), inputs_(std::move(inputs)) {
    std::vector<ValueType> types;
    for (const Tensor& input : inputs_) types.push_back({input.dtype, input.shape});
    const std::vector<ValueType> output_types = op_->infer(types);
    for (const ValueType& type : output_types) {
      memory_.push_back(gpu.tensor(type));
      outputs_.push_back(memory_.back());
    }
    flops_ = op_->cost(types, output_types).flops;
    extents_.resize(inputs_.size() + outputs_.size());
    // Ragged rows need room for where they begin and end.
    workspace_ = Buffer(std::max<int64_t>(gpu.backend().workspace_bytes(*op_, types), 64),
                        "scratch memory", gpu.device());
  }

  /// Rows of the first input end at `extent`, in the GPU's memory.
  void make_ragged(const int64_t* extent) { extents_[0] = extent; }
  /// The same of the first output.
  void make_result_ragged(const int64_t* extent) { extents_[inputs_.size()] = extent; }

  double flops() const { return flops_; }
  const Tensor& output(size_t idx) const { return outputs_[idx]; }
  KernelArgs args() const {
    return {.inputs = inputs_,
            .outputs = outputs_,
            .workspace = workspace_.bytes(),
            .extents = extents_,
            .context = gpu_.backend().context()};
  }
  void run() const { gpu_.backend().kernel (*op_)(*op_, args()); }
  /// Writes accumulators instead of adding to them.
  void run_unset() const {
    KernelArgs unset = args();
    unset.set_accumulators = true;
    gpu_.backend().kernel (*op_)(*op_, unset);
  }

 private:
  const Gpu& gpu_;
  OperatorPtr op_;
  std::vector<Tensor> inputs_;
  std::vector<OwnedTensor> memory_;
  std::vector<Tensor> outputs_;
  std::vector<const int64_t*> extents_;
  Buffer workspace_;
  double flops_ = 0;
};

/// FLOP/s of a square BF16 product.
inline double dense_rate(const Gpu& gpu) {
  constexpr int64_t kSize = 8192;
  const ValueType type{DType::kBF16, {kSize, kSize}};
  const OwnedTensor a = gpu.random(type);
  const OwnedTensor b = gpu.random(type);
  const Call call(gpu, make_linear(), {a, b});
  return call.flops() / gpu.median_seconds([&] { call.run(); });
}

}  // namespace tessera
