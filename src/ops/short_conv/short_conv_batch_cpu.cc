#include <algorithm>

#include "ops/batch_rows.h"
#include "ops/cpu_dispatch.h"
#include "ops/short_conv/short_conv.h"
#include "ops/short_conv/short_conv_batch.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

constexpr int64_t kBlockChannels = 64;

/// Some channels of a call, the work of one thread.
template <typename T>
struct BatchBlock {
  const T* x;  // of the block's first channel, as the following two
  T* y;
  T* states;
  int64_t stride;
  int64_t count;
  int64_t taps;
  bool silu;
  float weights[ShortConv::kMaxTaps][kBlockChannels];  // turned: neighbours are channels
  float bias[kBlockChannels] = {};

  BatchBlock(const ShortConvBatch& op, const Args<ShortConvBatch>& args, int64_t first)
      : x(args.in(ShortConvBatch::kX).as<T>() + first),
        y(args.out(ShortConvBatch::kY).as<T>() + first),
        states(args.out(ShortConvBatch::kState).as<T>() + first),
        stride(args.in(ShortConvBatch::kX).shape[1]),
        count(std::min(kBlockChannels, stride - first)),
        taps(args.in(ShortConvBatch::kWeight).shape[1]),
        silu(op.silu()) {
    const float* w = args.in(ShortConvBatch::kWeight).as<float>() + first * taps;
    for (int64_t i = 0; i < taps; ++i) {
      for (int64_t c = 0; c < count; ++c) weights[i][c] = w[c * taps + i];
    }
    if (op.biased()) std::copy_n(args.in(ShortConvBatch::kBias).as<float>() + first, count, bias);
  }

  /// Input `back` tokens before the sequence's first row, 1 being the last; null: none was.
  const T* earlier(const BatchRows& rows, int64_t back) const {
    return rows.is_first ? nullptr : states + (rows.slot * taps + taps - back) * stride;
  }
  const T* input(const BatchRows& rows, int64_t token) const {
    return token >= rows.begin ? x + token * stride : earlier(rows, rows.begin - token);
  }

  void convolve(const BatchRows& rows) const {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      simd::for_each_vector(count, [&](int64_t c, auto lanes) {
        simd::Vec sum = simd::load(bias + c, lanes);
        for (int64_t i = 0; i < taps; ++i) {
          const T* from = input(rows, t - taps + 1 + i);
          if (from != nullptr)
            sum += simd::load(weights[i] + c, lanes) * simd::load(from + c, lanes);
        }
        simd::store(y + t * stride + c, silu ? sum * simd::sigmoid(sum) : sum, lanes);
      });
    }
  }

  /// Makes the slot's rows the last inputs; its earlier ones move to the front first.
  void move_on(const BatchRows& rows) const {
    for (int64_t i = 0; i < taps; ++i) {
      const T* from = input(rows, rows.end - taps + i);
      T* to = states + (rows.slot * taps + i) * stride;
      if (from == nullptr) {
        std::fill_n(to, count, T(0.0F));
      } else {
        std::copy_n(from, count, to);
      }
    }
  }
};

void short_conv_batch(const ShortConvBatch& op, const Args<ShortConvBatch>& args) {
  using Op = ShortConvBatch;
  const Tensor& x = args.in(Op::kX);
  const std::vector<BatchRows> batch =
      read_batch_rows(op,
                      {.cu_seqlens = args.in(Op::kCuSeqlens).span<int32_t>(),
                       .lengths = args.in(Op::kLengths).span<int32_t>(),
                       .slots = args.in(Op::kSlots).span<int32_t>()},
                      x.shape[0], op.num_slots());
  const int64_t blocks = (x.shape[1] + kBlockChannels - 1) / kBlockChannels;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; ++b) {
      const BatchBlock<T> block(op, args, b * kBlockChannels);
      for (const BatchRows& rows : batch) {
        block.convolve(rows);
        block.move_on(rows);
      }
    }
    T* y = args.out(Op::kY).as<T>();
    std::fill(y + end_of_rows(batch) * x.shape[1], y + x.num_elements(), T(0.0F));
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_short_conv_batch_cpu, table) {
  add_kernel<ShortConvBatch>(table, short_conv_batch);
}

}  // namespace tessera
