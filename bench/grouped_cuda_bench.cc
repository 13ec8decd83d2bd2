// The grouped products of MoE layers on the GPU, cold L2, one JSON line a shape, as
// bench/rivals/grouped_mm.py prints for PyTorch: run both in one go, and compare.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "core/dtype.h"
#include "core/random.h"
#include "ops/cuda/device_buffer.h"
#include "ops/grouped_matmul/grouped_matmul_cuda.h"

namespace tessera::cuda {
namespace {

constexpr int kWarmups = 3;
constexpr int kRepeats = 10;
constexpr size_t kFlushBytes = size_t{256} << 20;

struct Shape {
  const char* name;
  int experts;
  int64_t rows;
  int64_t inner;
  int64_t hidden;
};

constexpr Shape kShapes[] = {
    {"mixtral fc1", 8, 16384, 28672, 4096}, {"mixtral fc2", 8, 16384, 14336, 4096},
    {"qwen fc1", 128, 65536, 1536, 2048},   {"qwen fc2", 128, 65536, 768, 2048},
    {"dsv3 fc1", 32, 65536, 4096, 7168},    {"dsv3 fc2", 32, 65536, 2048, 7168},
};

/// Where each expert's rows begin: equal shares, or the softmax of 0.5 · normal.
std::vector<int64_t> split_rows(const Shape& shape, bool skewed) {
  Random random(5, 1);
  std::vector<double> shares;
  double sum = 0;
  for (int e = 0; e < shape.experts; ++e) {
    shares.push_back(std::exp(skewed ? 0.5 * random.next_normal() : 0.0));
    sum += shares.back();
  }
  std::vector<int64_t> begins{0};
  for (const double share : shares) {
    const auto rows = static_cast<int64_t>(share / sum * static_cast<double>(shape.rows));
    begins.push_back(begins.back() + rows);
  }
  begins.back() = shape.rows;
  return begins;
}

/// BF16 normal numbers; a block of them is repeated.
DeviceBuffer random_values(int64_t count, uint64_t seed) {
  std::vector<float> values(size_t{1} << 22);
  fill_normal(values, seed, 1, 1.0F);
  const std::vector<Bf16> block(values.begin(), values.end());
  const size_t block_bytes = block.size() * sizeof(Bf16);
  DeviceBuffer buffer(static_cast<size_t>(count) * sizeof(Bf16));
  for (size_t at = 0; at < buffer.num_bytes(); at += block_bytes) {
    check(cudaMemcpy(buffer.as<char>() + at, block.data(),
                     std::min(block_bytes, buffer.num_bytes() - at), cudaMemcpyHostToDevice));
  }
  return buffer;
}

double median_ms(const std::function<void()>& run, const DeviceBuffer& flush) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kWarmups + kRepeats; ++i) {
    check(cudaMemsetAsync(flush.as<void>(), i, flush.num_bytes()));
    check(cudaEventRecord(begin));
    run();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= kWarmups) times.push_back(ms);
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  std::ranges::sort(times);
  return times[times.size() / 2];
}

void measure(const Shape& shape, bool skewed, const DeviceBuffer& flush) {
  const std::vector<int64_t> offsets = split_rows(shape, skewed);
  std::vector<int> begins;
  for (int e = 0; e <= shape.experts; ++e) begins.push_back(e * static_cast<int>(shape.inner));
  DeviceBuffer device_offsets(offsets.size() * sizeof(int64_t));
  DeviceBuffer device_begins(begins.size() * sizeof(int));
  device_offsets.copy_from(offsets.data());
  device_begins.copy_from(begins.data());
  const int64_t total = shape.experts * shape.inner;
  const ExpertBlocks experts = {shape.experts,
                                device_begins.as<int>(),
                                device_offsets.as<int64_t>(),
                                shape.hidden,
                                shape.inner,
                                total};
  const DeviceBuffer narrow = random_values(shape.rows * shape.inner, 1);
  const DeviceBuffer wide = random_values(shape.rows * shape.hidden, 2);
  const DeviceBuffer weight = random_values(total * shape.hidden, 3);
  const DeviceBuffer narrow_out(narrow.num_bytes());
  const DeviceBuffer wide_out(wide.num_bytes());
  const DeviceBuffer grad(static_cast<size_t>(total * shape.hidden) * sizeof(float));
  const auto rows = [&](bool by_out) {
    grouped_rows({experts, by_out, shape.rows, (by_out ? wide : narrow).as<void>(),
                  weight.as<void>(), (by_out ? narrow_out : wide_out).as<void>()},
                 nullptr);
  };
  const auto wgrad = [&](bool accumulate) {
    grouped_wgrad(
        {experts, shape.rows, narrow.as<void>(), wide.as<void>(), grad.as<float>(), accumulate},
        nullptr);
  };
  const double flops = 2.0 * static_cast<double>(shape.rows * shape.inner * shape.hidden);
  const auto report = [&](const char* name, const std::function<void()>& run) {
    const double ms = median_ms(run, flush);
    fmt::print(", \"{}\": {{\"ms\": {:.4f}, \"tflops\": {:.1f}}}", name, ms, flops / ms / 1e9);
  };
  fmt::print("{{\"shape\": \"{}\", \"skewed\": {}", shape.name, skewed);
  report("by_out", [&] { rows(true); });
  report("by_in", [&] { rows(false); });
  report("wgrad", [&] { wgrad(false); });
  report("wgrad_added", [&] { wgrad(true); });
  fmt::print("}}\n");
}

}  // namespace
}  // namespace tessera::cuda

int main() {
  const tessera::cuda::DeviceBuffer flush(tessera::cuda::kFlushBytes);
  for (const auto& shape : tessera::cuda::kShapes) {
    for (const bool skewed : {false, true}) tessera::cuda::measure(shape, skewed, flush);
  }
}
