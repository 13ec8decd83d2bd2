// A thread takes a vector of channels of a run of tokens, whose last rows it keeps in registers.
// Kernels have 4 or 16 taps: shorter weights stand behind zeros.
#include "ops/short_conv/short_conv_kernels.h"

#include <algorithm>

#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRun = 64;  // tokens of a thread of the forward pass
constexpr int kMaxParts = 256;
constexpr int kLeastPart = 16;  // tokens

/// Where a token's sequence begins, for tokens that rise.
struct SequenceWalk {
  const int32_t* bounds;
  int count;
  int idx = 0;
  int begin = 0;
  int end = 0;

  __device__ SequenceWalk(const ConvSequences& sequences, int token)
      : bounds(sequences.bounds), count(sequences.count) {
    idx = find_part(bounds, count, token);
    begin = bounds[idx];
    end = bounds[idx + 1];
  }
  __device__ __forceinline__ void go_to(int token) {
    while (token >= end && idx + 1 < count) {
      ++idx;
      begin = end;
      end = bounds[idx + 1];
    }
  }
};

template <int kTaps, int kWidth>
struct ConvWeights {
  float of[kTaps][kWidth];
  Floats<kWidth> bias = {};

  __device__ __forceinline__ ConvWeights(const ConvRows& call, int64_t channel) {
    const int taps = call.taps;
    const float* weight = call.weight + channel * taps;
    if (call.bias != nullptr) {
#pragma unroll
      for (int c = 0; c < kWidth; ++c) bias[c] = call.bias[channel + c];
    }
    if (kTaps == 4 && taps == 4 && reinterpret_cast<uintptr_t>(weight) % 16 == 0) {
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const Floats<4> four = load<4>(weight + 4 * c);
#pragma unroll
        for (int i = 0; i < kTaps; ++i) of[i][c] = four[i % 4];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const int tap = i - (kTaps - taps);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) of[i][c] = tap < 0 ? 0 : weight[c * taps + tap];
    }
  }
};

/// The rows of the last kTaps tokens, in turns: the newest lies in slot `newest`, the tap i of it
/// in slot_of(newest, i).
template <int kTaps>
__device__ __forceinline__ int slot_of(int newest, int i) {
  return (newest + 1 + i) % kTaps;
}

template <typename T, int kTaps, int kWidth>
struct ConvWindow {
  Floats<kWidth> rows[kTaps];

  /// The rows before `token`, which will be in slot 0, as far as its sequence reaches.
  __device__ __forceinline__ void fill(const T* x, int64_t channels, int token, int begin) {
#pragma unroll
    for (int i = 1; i < kTaps; ++i) {
      const int from = token - kTaps + i;
      rows[i] = from >= begin ? load<kWidth>(x + from * channels) : Floats<kWidth>{};
    }
  }
  /// The sum at the newest token, `behind` tokens behind its sequence's first.
  __device__ __forceinline__ Floats<kWidth> sum(const ConvWeights<kTaps, kWidth>& weights,
                                                int newest, int behind) const {
    Floats<kWidth> sums = weights.bias;
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      if (kTaps - 1 - i > behind) continue;
#pragma unroll
      for (int c = 0; c < kWidth; ++c)
        sums[c] += weights.of[i][c] * rows[slot_of<kTaps>(newest, i)][c];
    }
    return sums;
  }
};

// As many tokens are loaded at once as there are taps, so that a token's slot is its number.
template <typename T, int kWidth, int kTaps>
__global__ void __launch_bounds__(kThreads)
    convolve(const __grid_constant__ ConvRows call, ConvSequences sequences, T* y) {
  wait_for_earlier();
  const int64_t channels = call.channels;
  const int64_t channel = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kWidth;
  if (channel >= channels) return;
  const int first = static_cast<int>(blockIdx.x) * kRun;
  const int last = min(first + kRun, static_cast<int>(call.tokens));
  const T* x = static_cast<const T*>(call.x) + channel;
  y += channel;
  const ConvWeights<kTaps, kWidth> weights(call, channel);
  SequenceWalk walk(sequences, first);
  ConvWindow<T, kTaps, kWidth> window;
  window.fill(x, channels, first, walk.begin);
  for (int t = first; t < last; t += kTaps) {
    Pack<T, kWidth> loaded[kTaps];
#pragma unroll
    for (int b = 0; b < kTaps; ++b)
      if (t + b < last) loaded[b] = load_pack<kWidth>(x + (t + b) * channels);
#pragma unroll
    for (int b = 0; b < kTaps; ++b) {
      const int token = t + b;
      if (token >= last) break;
      walk.go_to(token);
      window.rows[b] = to_floats(loaded[b]);
      Floats<kWidth> sums = window.sum(weights, b, token - walk.begin);
#pragma unroll
      for (int c = 0; c < kWidth; ++c)
        if (call.silu) sums[c] = Silu::value(sums[c]);
      store_once(y + token * channels, sums);
    }
  }
}

struct ConvBackwardParams {
  ConvRows call;
  ConvSequences sequences;
  const void* grad;
  void* grad_x;
  float* partials;       ///< or null
  float* bias_partials;  ///< or null
  int part;              ///< tokens
};

/// What of a run of tokens the backward pass carries from one to the next.
template <typename T, int kWidth, int kTaps>
struct ConvBackward {
  ConvWindow<T, kTaps, kWidth> window;
  Floats<kWidth> of_x[kTaps] = {};       // of the last tokens, in the window's slots, still growing
  Floats<kWidth> of_weight[kTaps] = {};  // of the run's own tokens
  Floats<kWidth> of_bias = {};

  /// The gradient of the sum at the newest token goes to its taps.
  __device__ __forceinline__ void spread(const ConvWeights<kTaps, kWidth>& weights,
                                         const Pack<T, kWidth>& grad, int newest, int behind,
                                         bool is_own, bool silu) {
    const Floats<kWidth> sums = window.sum(weights, newest, behind);
    Floats<kWidth> g = to_floats(grad);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      if (silu) g[c] *= Silu::slope(sums[c]).derivative;
      if (is_own) of_bias[c] += g[c];
    }
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const int slot = slot_of<kTaps>(newest, i);
      if (kTaps - 1 - i > behind) continue;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) of_x[slot][c] += weights.of[i][c] * g[c];
      if (!is_own) continue;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) of_weight[i][c] += g[c] * window.rows[slot][c];
    }
  }
};

template <typename T, int kWidth, int kTaps>
__global__ void __launch_bounds__(kThreads)
    convolve_backward(const __grid_constant__ ConvBackwardParams p) {
  wait_for_earlier();
  const int64_t channels = p.call.channels;
  const int64_t channel = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kWidth;
  if (channel >= channels) return;
  const int tokens = static_cast<int>(p.call.tokens);
  const int first = static_cast<int>(blockIdx.x) * p.part;
  const int last = min(first + p.part, tokens);
  if (first >= last) return;
  const T* x = static_cast<const T*>(p.call.x) + channel;
  const T* grad = static_cast<const T*>(p.grad) + channel;
  T* grad_x = static_cast<T*>(p.grad_x) + channel;
  const ConvWeights<kTaps, kWidth> weights(p.call, channel);
  SequenceWalk walk(p.sequences, first);
  ConvBackward<T, kWidth, kTaps> state;
  state.window.fill(x, channels, first, walk.begin);
  // Tokens behind the run read its last ones, which are complete kTaps - 1 tokens on.
  const int end = last + kTaps - 1;
  for (int t = first; t < end; t += kTaps) {
    Pack<T, kWidth> rows[kTaps];
    Pack<T, kWidth> grads[kTaps];
#pragma unroll
    for (int b = 0; b < kTaps; ++b) {
      if (t + b >= min(end, tokens)) continue;
      rows[b] = load_pack<kWidth>(x + (t + b) * channels);
      grads[b] = load_pack<kWidth>(grad + (t + b) * channels);
    }
#pragma unroll
    for (int b = 0; b < kTaps; ++b) {
      const int token = t + b;
      if (token >= end) break;
      if (token < tokens) {
        walk.go_to(token);
        state.window.rows[b] = to_floats(rows[b]);
        state.spread(weights, grads[b], b, token - walk.begin, token < last, p.call.silu);
      }
      const int done = token - (kTaps - 1);
      Floats<kWidth>& oldest = state.of_x[slot_of<kTaps>(b, 0)];
      if (done >= first) store_once(grad_x + done * channels, oldest);
      oldest = {};
    }
  }
  if (p.bias_partials != nullptr)
    store(p.bias_partials + blockIdx.x * channels + channel, state.of_bias);
  if (p.partials == nullptr) return;
  const int taps = p.call.taps;
  float* to = p.partials + (blockIdx.x * channels + channel) * taps;
  if (kTaps == 4 && taps == 4) {
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      Floats<4> four;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) four[i % 4] = state.of_weight[i][c];
      store(to + 4 * c, four);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    const int tap = i - (kTaps - taps);
#pragma unroll
    for (int c = 0; c < kWidth; ++c)
      if (tap >= 0) to[c * taps + tap] = state.of_weight[i][c];
  }
}

/// A thread takes a channel of a token.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    convolve_cached(const __grid_constant__ ConvRows call, const int32_t* start, const T* state,
                    T* y) {
  wait_for_earlier();
  const int64_t channels = call.channels;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= channels) return;
  const bool is_first = *start == 0;
  const T* x = static_cast<const T*>(call.x);
  for (int64_t t = blockIdx.y; t < call.tokens; t += gridDim.y) {
    float sum = call.bias == nullptr ? 0.0F : call.bias[channel];
    for (int i = 0; i < call.taps; ++i) {
      const int64_t token = t - call.taps + 1 + i;
      if (token < 0 && is_first) continue;
      const T value = token < 0 ? state[(call.taps + token) * channels + channel]
                                : x[token * channels + channel];
      sum += call.weight[channel * call.taps + i] * static_cast<float>(value);
    }
    store(y + t * channels + channel, Floats<1>{call.silu ? Silu::value(sum) : sum});
  }
}

/// Rows move towards the front, so a channel's may be overwritten in order.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    keep_last_inputs(const __grid_constant__ ConvRows call, const int32_t* start, T* state) {
  wait_for_earlier();
  const int64_t channels = call.channels;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= channels) return;
  const bool is_first = *start == 0;
  for (int i = 0; i < call.taps; ++i) {
    const int64_t token = call.tokens - call.taps + i;
    T* to = state + i * channels + channel;
    if (token >= 0) {
      *to = static_cast<const T*>(call.x)[token * channels + channel];
    } else {
      *to = is_first ? T(0.0F) : state[(i + call.tokens) * channels + channel];
    }
  }
}

/// Calls run.operator()<T, kWidth, kTaps>().
template <typename Run>
void with_taps(const ConvRows& call, bool vectors, Run run) {
  if (call.taps > 4)
    return with_type(call.dtype, [&]<typename T>() { run.template operator()<T, 1, 16>(); });
  with_vectors(call.dtype, vectors,
               [&]<typename T, int kWidth>() { run.template operator()<T, kWidth, 4>(); });
}

unsigned channel_blocks(const ConvRows& call, int width) {
  return static_cast<unsigned>(divide_up(call.channels, kThreads * width));
}

}  // namespace

int conv_parts(int64_t tokens) {
  return static_cast<int>(std::clamp<int64_t>(tokens / kLeastPart, 1, kMaxParts));
}

void launch_short_conv(const ConvRows& call, const ConvSequences& sequences, void* y,
                       cudaStream_t stream) {
  if (call.tokens == 0 || call.channels == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.channels) && are_aligned(call.x, y);
  with_taps(call, vectors, [&]<typename T, int kWidth, int kTaps>() {
    const dim3 blocks(static_cast<unsigned>(divide_up(call.tokens, kRun)),
                      channel_blocks(call, kWidth));
    launch_early(convolve<T, kWidth, kTaps>, {blocks, kThreads}, stream, call, sequences,
                 static_cast<T*>(y));
  });
}

void launch_short_conv_backward(const ConvRows& call, const ConvSequences& sequences,
                                const ConvGrads& grads, cudaStream_t stream) {
  if (call.tokens == 0 || call.channels == 0) return;
  const bool vectors =
      are_whole_vectors(call.dtype, call.channels) && are_aligned(call.x, grads.y, grads.x);
  const int part = static_cast<int>(divide_up(call.tokens, conv_parts(call.tokens)));
  const int parts = static_cast<int>(divide_up(call.tokens, part));
  const bool has_weight = grads.weight.sums != nullptr;
  const bool has_bias = grads.bias.sums != nullptr;
  const ConvBackwardParams params = {.call = call,
                                     .sequences = sequences,
                                     .grad = grads.y,
                                     .grad_x = grads.x,
                                     .partials = has_weight ? grads.partials : nullptr,
                                     .bias_partials = has_bias ? grads.bias_partials : nullptr,
                                     .part = part};
  with_taps(call, vectors, [&]<typename T, int kWidth, int kTaps>() {
    const dim3 blocks(static_cast<unsigned>(parts), channel_blocks(call, kWidth));
    launch_early(convolve_backward<T, kWidth, kTaps>, {blocks, kThreads}, stream, params);
  });
  if (has_weight)
    launch_add_partials(grads.weight, grads.partials, parts, call.channels * call.taps, stream);
  if (has_bias) launch_add_partials(grads.bias, grads.bias_partials, parts, call.channels, stream);
}

void launch_short_conv_cached(const ConvRows& call, const int32_t* start, void* y, void* state,
                              cudaStream_t stream) {
  if (call.tokens == 0 || call.channels == 0) return;
  with_type(call.dtype, [&]<typename T>() {
    const auto rows = static_cast<unsigned>(std::min<int64_t>(call.tokens, 4096));
    launch_early(convolve_cached<T>, {dim3(channel_blocks(call, 1), rows), kThreads}, stream, call,
                 start, static_cast<const T*>(state), static_cast<T*>(y));
    launch_early(keep_last_inputs<T>, {channel_blocks(call, 1), kThreads}, stream, call, start,
                 static_cast<T*>(state));
  });
}

}  // namespace tessera::cuda
