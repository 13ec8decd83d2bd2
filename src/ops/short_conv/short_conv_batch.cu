// The convolution of several sequences' tokens: a thread takes a channel of a sequence, and keeps
// its last inputs in registers.
#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/short_conv/short_conv_batch_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 4;  // inputs that are read together

/// kTaps or fewer: shorter weights stand behind zeros.
template <typename T, int kTaps>
struct BatchChannel {
  const ConvBatch& p;
  int64_t channel;
  float bias;
  float weights[kTaps];
  float inputs[kTaps];  ///< the last ones, the newest last

  __device__ __forceinline__ T* kept(int slot) const {
    return static_cast<T*>(p.states) + static_cast<int64_t>(slot) * p.taps * p.channels + channel;
  }
  __device__ __forceinline__ void begin(int slot, bool is_first) {
    bias = p.bias == nullptr ? 0.0F : p.bias[channel];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const int tap = i - (kTaps - p.taps);
      weights[i] = tap < 0 ? 0 : p.weight[channel * p.taps + tap];
      inputs[i] = tap < 0 || is_first ? 0 : load<1>(kept(slot) + tap * p.channels)[0];
    }
  }
  __device__ __forceinline__ float take(float input) {
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) inputs[i] = inputs[i + 1];
    inputs[kTaps - 1] = input;
    float sum = bias;
#pragma unroll
    for (int i = 0; i < kTaps; ++i) sum += weights[i] * inputs[i];
    return p.silu ? Silu::value(sum) : sum;
  }
  __device__ __forceinline__ void end(int slot) const {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const int tap = i - (kTaps - p.taps);
      if (tap >= 0) store(kept(slot) + tap * p.channels, Floats<1>{{inputs[i]}});
    }
  }
};

template <typename T, int kTaps>
__global__ void __launch_bounds__(kThreads) convolve_batch(const ConvBatch p) {
  wait_for_earlier();
  let_next_begin();
  const int64_t channel = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (channel >= p.channels) return;
  auto* const y = static_cast<T*>(p.y) + channel;
  const int last = p.bounds[p.num_sequences];
  for (int64_t t = last + static_cast<int>(blockIdx.y); t < p.tokens; t += gridDim.y)
    store(y + t * p.channels, Floats<1>{});
  if (p.num_sequences == 0) return;
  const int begin = p.bounds[blockIdx.y];
  const int end = p.bounds[blockIdx.y + 1];
  if (begin >= end) return;
  const int length = p.lengths[blockIdx.y];
  const int slot = p.slots[blockIdx.y];
  if (length < end - begin || slot < 0 || slot >= p.num_slots || end > p.tokens)
    fail("short_conv_batch: new tokens of a sequence that cannot have them, or no slot", slot);
  BatchChannel<T, kTaps> own{p, channel, 0, {}, {}};
  own.begin(slot, length == end - begin);
  const auto* const x = static_cast<const T*>(p.x) + channel;
  for (int64_t first = begin; first < end; first += kAhead) {
    float inputs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      inputs[i] = first + i < end ? load<1>(x + (first + i) * p.channels)[0] : 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < end) store(y + (first + i) * p.channels, Floats<1>{{own.take(inputs[i])}});
    }
  }
  own.end(slot);
}

}  // namespace

void launch_short_conv_batch(const ConvBatch& batch, cudaStream_t stream) {
  if (batch.tokens == 0 || batch.channels == 0) return;
  const dim3 blocks(static_cast<unsigned>(divide_up(batch.channels, kThreads)),
                    static_cast<unsigned>(batch.num_sequences > 0 ? batch.num_sequences : 1));
  with_type(batch.dtype, [&]<typename T>() {
    const auto kernel = batch.taps <= 4 ? convolve_batch<T, 4> : convolve_batch<T, 16>;
    launch_early(kernel, {blocks, kThreads}, stream, batch);
  });
}

}  // namespace tessera::cuda
