#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/sequence_bounds.h"
#include "ops/short_conv/short_conv.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

constexpr int64_t kChannels = 64;
constexpr int64_t kMaxTaps = ShortConv::kMaxTaps;

/// Some channels of all tokens, the work of one thread at a time.
template <typename T>
struct ChannelBlock {
  const T* x;  // of the block's first channel
  int64_t stride;
  int64_t count;
  int64_t taps;
  float weights[kMaxTaps][kChannels];  // turned: neighbours are channels
  float bias[kChannels] = {};

  template <typename Op>
  ChannelBlock(const Op& op, const Args<Op>& args, int64_t first)
      : x(args.in(Op::kX).template as<T>() + first),
        stride(args.in(Op::kX).shape[1]),
        count(std::min(kChannels, stride - first)),
        taps(args.in(Op::kWeight).shape[1]) {
    const int64_t channel = op.spec().first_channel + first;
    if (op.biased()) std::copy_n(args.in(Op::kBias).template as<float>() + channel, count, bias);
    const float* w = args.in(Op::kWeight).template as<float>() + channel * taps;
    for (int64_t i = 0; i < taps; ++i) {
      for (int64_t c = 0; c < count; ++c) weights[i][c] = w[c * taps + i];
    }
  }

  /// The token that tap i of token t reads; below `begin` where there is none.
  int64_t token_of(int64_t t, int64_t i) const { return t - taps + 1 + i; }
  int64_t first_tap(int64_t t, int64_t begin) const {
    return std::max<int64_t>(0, begin - token_of(t, 0));
  }

  template <typename Lanes>
  simd::Vec sum_at(int64_t t, int64_t begin, int64_t c, Lanes lanes) const {
    simd::Vec sum = simd::load(bias + c, lanes);
    for (int64_t i = first_tap(t, begin); i < taps; ++i) {
      sum += simd::load(weights[i] + c, lanes) * simd::load(x + token_of(t, i) * stride + c, lanes);
    }
    return sum;
  }
};

simd::Vec activate(simd::Vec sum, bool silu) {
  return silu ? sum * simd::sigmoid(sum) : sum;
}

int64_t num_blocks(const Tensor& x) {
  return (x.shape[1] + kChannels - 1) / kChannels;
}

template <typename T>
void convolve(const ShortConv& op, const Args<ShortConv>& args, std::span<const int32_t> bounds) {
  const Tensor& x = args.in(ShortConv::kX);
  T* out = args.out(ShortConv::kY).as<T>();
  const int64_t blocks = num_blocks(x);
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < blocks; ++b) {
    const ChannelBlock<T> block(op, args, b * kChannels);
    for (size_t s = 0; s + 1 < bounds.size(); ++s) {
      for (int64_t t = bounds[s]; t < bounds[s + 1]; ++t) {
        T* y = out + t * block.stride + b * kChannels;
        simd::for_each_vector(block.count, [&](int64_t c, auto lanes) {
          const simd::Vec sum = block.sum_at(t, bounds[s], c, lanes);
          simd::store(y + c, activate(sum, op.silu()), lanes);
        });
      }
    }
  }
}

/// Gradients of the sums of the last tokens and of the weights, of one block.
struct BlockGrads {
  float sums[kMaxTaps][kChannels];  // of token t in row t mod taps
  float weights[kMaxTaps][kChannels] = {};
  float bias[kChannels] = {};
  bool has_bias = false;
  bool silu = true;
};

/// Of token t in [begin, end), of which those behind it were seen.
template <typename T>
void convolve_backward_at(const ChannelBlock<T>& block, int64_t t, int64_t begin, int64_t end,
                          const T* grad, T* grad_x, BlockGrads& grads) {
  const int64_t taps = block.taps;
  float* own = grads.sums[t % taps];
  simd::for_each_vector(block.count, [&](int64_t c, auto lanes) {
    simd::Vec g = simd::load(grad + t * block.stride + c, lanes);
    if (grads.silu) {
      const simd::Vec sum = block.sum_at(t, begin, c, lanes);
      const simd::Vec gate = simd::sigmoid(sum);
      g = g * (gate * (1.0F + sum * (1.0F - gate)));
    }
    simd::store(own + c, g, lanes);
    if (grads.has_bias) simd::store(grads.bias + c, simd::load(grads.bias + c, lanes) + g, lanes);
    for (int64_t i = block.first_tap(t, begin); i < taps; ++i) {
      const simd::Vec x = simd::load(block.x + block.token_of(t, i) * block.stride + c, lanes);
      simd::store(grads.weights[i] + c, simd::load(grads.weights[i] + c, lanes) + g * x, lanes);
    }
    simd::Vec total{};
    for (int64_t i = 0; i < taps; ++i) {
      const int64_t reader = t + taps - 1 - i;
      if (reader >= end) continue;
      total += simd::load(block.weights[i] + c, lanes) *
               simd::load(grads.sums[reader % taps] + c, lanes);
    }
    simd::store(grad_x + t * block.stride + c, total, lanes);
  });
}

template <typename T>
void convolve_backward(const ShortConvBackward& op, const Args<ShortConvBackward>& args,
                       std::span<const int32_t> bounds) {
  using Op = ShortConvBackward;
  const Tensor& x = args.in(Op::kX);
  const T* grad = args.in(Op::kGrad).as<T>();
  T* grad_x = args.out(Op::kGradX).as<T>();
  float* grad_weight = args.out(Op::kGradWeight) ? args.out(Op::kGradWeight).as<float>() : nullptr;
  float* grad_bias =
      op.biased() && args.out(Op::kGradBias) ? args.out(Op::kGradBias).as<float>() : nullptr;
  const int64_t blocks = num_blocks(x);
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = b * kChannels;
    const ChannelBlock<T> block(op, args, first);
    BlockGrads grads;
    grads.has_bias = grad_bias != nullptr;
    grads.silu = op.silu();
    for (size_t s = 0; s + 1 < bounds.size(); ++s) {
      for (int64_t t = bounds[s + 1] - 1; t >= bounds[s]; --t)
        convolve_backward_at(block, t, bounds[s], bounds[s + 1], grad + first, grad_x + first,
                             grads);
    }
    const int64_t channel = op.spec().first_channel + first;
    for (int64_t c = 0; grad_bias != nullptr && c < block.count; ++c)
      grad_bias[channel + c] += grads.bias[c];
    if (grad_weight == nullptr) continue;
    for (int64_t c = 0; c < block.count; ++c) {
      for (int64_t i = 0; i < block.taps; ++i)
        grad_weight[(channel + c) * block.taps + i] += grads.weights[i][c];
    }
  }
}

void short_conv(const ShortConv& op, const Args<ShortConv>& args) {
  const Tensor& x = args.in(ShortConv::kX);
  const auto bounds = args.in(ShortConv::kCuSeqlens).span<int32_t>();
  check_cu_seqlens(op, bounds, x.shape[0]);
  with_storage(x.dtype, [&](auto storage) { convolve<decltype(storage)>(op, args, bounds); });
}

void short_conv_backward(const ShortConvBackward& op, const Args<ShortConvBackward>& args) {
  const Tensor& x = args.in(ShortConvBackward::kX);
  const auto bounds = args.in(ShortConvBackward::kCuSeqlens).span<int32_t>();
  check_cu_seqlens(op, bounds, x.shape[0]);
  with_storage(x.dtype,
               [&](auto storage) { convolve_backward<decltype(storage)>(op, args, bounds); });
}

/// Tokens before the first given one are rows of the state, its last being the nearest; null where
/// there is none.
template <typename T>
void convolve_cached(const ShortConvCached& op, const Args<ShortConvCached>& args, const T* state) {
  const Tensor& x = args.in(ShortConvCached::kX);
  T* out = args.out(ShortConvCached::kY).as<T>();
  const int64_t blocks = num_blocks(x);
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = b * kChannels;
    const ChannelBlock<T> block(op, args, first);
    for (int64_t t = 0; t < x.shape[0]; ++t) {
      T* y = out + t * block.stride + first;
      simd::for_each_vector(block.count, [&](int64_t c, auto lanes) {
        simd::Vec sum = block.sum_at(t, 0, c, lanes);
        for (int64_t i = 0; state != nullptr && i < block.first_tap(t, 0); ++i) {
          const T* earlier = state + (block.taps + block.token_of(t, i)) * block.stride + first;
          sum += simd::load(block.weights[i] + c, lanes) * simd::load(earlier + c, lanes);
        }
        simd::store(y + c, activate(sum, op.silu()), lanes);
      });
    }
  }
}

/// The last inputs, those given behind the earlier ones.
template <typename T>
void move_on(const Tensor& x, const Tensor& state, bool is_first) {
  const int64_t taps = state.shape[0];
  const int64_t tokens = x.shape[0];
  const int64_t width = x.shape[1];
  T* rows = state.as<T>();
  for (int64_t i = 0; i < taps; ++i) {
    const int64_t token = tokens - taps + i;
    if (token >= 0) {
      std::copy_n(x.as<T>() + token * width, width, rows + i * width);
    } else if (is_first) {
      std::fill_n(rows + i * width, width, T(0.0F));
    } else {
      std::copy_n(rows + (i + tokens) * width, width, rows + i * width);
    }
  }
}

void short_conv_cached(const ShortConvCached& op, const Args<ShortConvCached>& args) {
  using Op = ShortConvCached;
  const Tensor& x = args.in(Op::kX);
  if (x.shape[0] == 0) return;
  const Tensor& state = args.out(Op::kState);
  const bool is_first = *args.in(Op::kStart).as<int32_t>() == 0;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    convolve_cached<T>(op, args, is_first ? nullptr : state.as<T>());
    move_on<T>(x, state, is_first);
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_short_conv_cpu, table) {
  add_kernel<ShortConv>(table, short_conv);
  add_kernel<ShortConvBackward>(table, short_conv_backward);
  add_kernel<ShortConvCached>(table, short_conv_cached);
}

}  // namespace tessera
