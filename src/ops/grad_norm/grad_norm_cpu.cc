#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/cpu_dispatch.h"
#include "ops/grad_norm/grad_norm.h"

namespace tessera {
namespace {

// Lanes are part of the order of summation: the same on every instruction set. The square of a
// float is exact in double, so that fused and separate multiply-adds agree as well.
constexpr int kLanes = 8;
constexpr int kUnroll = 4;
constexpr int64_t kChunksAtOnce = 4;  ///< that a thread takes
using Float8 = float __attribute__((vector_size(kLanes * sizeof(float))));
using Double8 = double __attribute__((vector_size(kLanes * sizeof(double))));

double add_lanes(const Double8& sum) {
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

Float8 load_lanes(const float* x) {
  Float8 values;
  std::memcpy(&values, x, sizeof(values));
  return values;
}

Float8 load_lanes(const Bf16* x) {
  using Word8 = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  using Half8 = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  Half8 halves;
  std::memcpy(&halves, x, sizeof(halves));
  const Word8 words = __builtin_convertvector(halves, Word8) << 16;
  Float8 values;
  std::memcpy(&values, &words, sizeof(values));
  return values;
}

template <typename T>
double sum_chunk(const T* x, int64_t n) {
  Double8 sums[kUnroll] = {};
  int64_t i = 0;
  for (; i + kLanes * kUnroll <= n; i += kLanes * kUnroll) {
    for (int u = 0; u < kUnroll; ++u) {
      const Double8 wide = __builtin_convertvector(load_lanes(x + i + u * kLanes), Double8);
      sums[u] += wide * wide;
    }
  }
  double sum = add_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) {
    const double value = static_cast<float>(x[i]);
    sum += value * value;
  }
  return sum;
}

int64_t count_chunks(const Tensor& x) {
  return (x.num_elements() + SumOfSquares::kChunk - 1) / SumOfSquares::kChunk;
}

double sum_chunk_of(const Tensor& x, int64_t chunk) {
  const int64_t first = chunk * SumOfSquares::kChunk;
  const int64_t n = std::min(SumOfSquares::kChunk, x.num_elements() - first);
  return x.dtype == DType::kBF16 ? sum_chunk(x.as<Bf16>() + first, n)
                                 : sum_chunk(x.as<float>() + first, n);
}

/// Threads take chunks of any input as they become free; each input's are added up in order.
void sums_of_squares(const SumOfSquares& /*op*/, const KernelArgs& args) {
  auto* const partial = reinterpret_cast<double*>(args.workspace.data());
  std::vector<int64_t> ends;  // of the inputs' chunks, counted through
  for (const Tensor& x : args.inputs)
    ends.push_back((ends.empty() ? 0 : ends.back()) + count_chunks(x));
  const int64_t num_chunks = ends.empty() ? 0 : ends.back();
#pragma omp parallel for schedule(dynamic, kChunksAtOnce) if (num_chunks > 1)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const auto input = std::ranges::upper_bound(ends, chunk) - ends.begin();
    const int64_t first = input == 0 ? 0 : ends[input - 1];
    partial[chunk] = sum_chunk_of(args.inputs[input], chunk - first);
  }
  int64_t chunk = 0;
  for (size_t i = 0; i < args.inputs.size(); ++i) {
    double sum = 0;
    for (; chunk < ends[i]; ++chunk) sum += partial[chunk];
    args.outputs.front().as<double>()[i] = sum;
  }
}

int64_t workspace_bytes(const SumOfSquares& /*op*/, std::span<const ValueType> inputs) {
  return SumOfSquares::workspace_bytes(inputs);
}

void grad_clip(const GradClip& /*op*/, const KernelArgs& args) {
  double total = 0;
  for (const double sum : args.in(GradClip::kSums).span<double>()) total += sum;
  const double* const limits = args.in(GradClip::kLimits).as<double>();
  double norm = norm_of(total, limits[0]);
  for (const Tensor& loss : args.inputs.subspan(GradClip::kFirstLoss)) {
    if (!std::isfinite(*loss.as<float>())) norm = std::numeric_limits<double>::quiet_NaN();
  }
  const bool finite = std::isfinite(norm);
  const double clip = finite ? clip_factor(norm, limits[1]) : 1.0;
  double* const result = args.out(GradClip::kNorm).as<double>();
  result[0] = norm;
  result[1] = clip;
  float* const grad_scale = args.out(GradClip::kGradScale).as<float>();
  grad_scale[0] = static_cast<float>(limits[0] * clip);
  grad_scale[1] = finite ? 0.0F : 1.0F;
}

}  // namespace

TESSERA_CPU_KERNELS(add_grad_norm_cpu, table) {
  add_kernel<GradClip>(table, grad_clip);
  add_kernel<SumOfSquares>(table, sums_of_squares, {.workspace = workspace_bytes});
}

}  // namespace tessera
