#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "gpu_calls.h"

/// Operators beside a copy and a product of the same run.
namespace tessera {

struct Rates {
  double copy;     ///< bytes read and written in a second
  double product;  ///< FLOP/s
};

inline Rates measure_rates(const Gpu& gpu) {
  constexpr int64_t kCopyBytes = int64_t{512} << 20;
  const ValueType type{DType::kBF16, {kCopyBytes / 2}};
  const OwnedTensor from = gpu.random(type);
  const OwnedTensor to = gpu.tensor(type);
  const double seconds = gpu.median_seconds([&] {
    cuda::check(cudaMemcpyAsync(to.get().data, from.get().data, kCopyBytes,
                                cudaMemcpyDeviceToDevice, gpu.context().stream()));
  });
  return {.copy = 2.0 * kCopyBytes / seconds, .product = dense_rate(gpu)};
}

/// The bounds of sequences of one length.
inline OwnedTensor sequence_bounds(const Gpu& gpu, int64_t sequences, int64_t length) {
  OwnedTensor host(DType::kI32, {sequences + 1});
  for (int64_t s = 0; s <= sequences; ++s)
    host.get().as<int32_t>()[s] = static_cast<int32_t>(s * length);
  OwnedTensor result = gpu.tensor({DType::kI32, {sequences + 1}});
  gpu.device().copy(result.get().data, host.get().data, host.get().num_bytes());
  return result;
}

/// Prints for each operator: microseconds (median), TFLOP/s, the fewest bytes that it must move
/// over the time as a share of what a copy reaches, its FLOPs over the time as a share of a BF16
/// product's, and the time of whichever binds over the time.
class OperatorBench {
 public:
  /// Runs those whose names have `wanted` in them.
  OperatorBench(const Gpu& gpu, std::string_view wanted) : gpu_(gpu), wanted_(wanted) {
    fmt::print("copy {:.0f} GB/s, product {:.0f} TFLOP/s\n{:24} {:>9} {:>8} {:>7} {:>8} {:>7}\n",
               rates_.copy * 1e-9, rates_.product * 1e-12, "", "us", "TFLOP/s", "copy", "product",
               "bound");
  }

  /// `flops`: of the operator, or 0 for those that its cost names.
  void run(std::string_view name, OperatorPtr op, const std::vector<Tensor>& inputs,
           double flops = 0) const {
    if (name.find(wanted_) == std::string_view::npos) return;
    const Call call(gpu_, op, inputs);
    std::vector<ValueType> types;
    double bytes = 0;
    for (const Tensor& input : inputs) {
      types.push_back({input.dtype, input.shape});
      bytes += static_cast<double>(input.num_bytes());
    }
    for (const ValueType& output : op->infer(types))
      bytes += static_cast<double>(output.num_bytes());
    const double seconds = gpu_.median_seconds([&] { call.run_unset(); });
    const double rate = (flops > 0 ? flops : call.flops()) / seconds;
    const double of_copy = bytes / rates_.copy / seconds;
    const double of_product = rate / rates_.product;
    fmt::print("{:24} {:9.1f} {:8.1f} {:6.1f}% {:7.1f}% {:6.1f}%\n", name, seconds * 1e6,
               rate * 1e-12, 100 * of_copy, 100 * of_product, 100 * std::max(of_copy, of_product));
  }

 private:
  const Gpu& gpu_;
  std::string_view wanted_;
  Rates rates_ = measure_rates(gpu_);
};

}  // namespace tessera
