#include "ops/cpu_dispatch.h"
#include "ops/mix_streams/mix_rule.h"
#include "ops/mix_streams/mix_streams.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// A token: its streams, what joins them, and by what.
template <typename T, int kStreams>
struct MixedToken {
  const T* x;
  const T* given;
  const float* post;
  const float* comb;
  int64_t hidden;

  template <typename Op>
  static MixedToken of(const Args<Op>& args, int64_t token) {
    const int64_t width = args.in(Op::kX).shape[1];
    const int64_t hidden = width / kStreams;
    return {args.in(Op::kX).template as<T>() + token * width,
            args.in(Op::kGiven).template as<T>() + token * hidden,
            args.in(Op::kPost).template as<float>() + token * kStreams,
            args.in(Op::kComb).template as<float>() + token * kStreams * kStreams, hidden};
  }

  void mix(T* y) const {
    simd::for_each_vector(hidden, [=, this](int64_t i, auto lanes) {
      simd::Vec sums[kStreams];
      const simd::Vec own = simd::load(given + i, lanes);
      for (int k = 0; k < kStreams; ++k) sums[k] = post[k] * own;
      for (int j = 0; j < kStreams; ++j) {
        const simd::Vec stream = simd::load(x + j * hidden + i, lanes);
        for (int k = 0; k < kStreams; ++k) sums[k] += comb[j * kStreams + k] * stream;
      }
      for (int k = 0; k < kStreams; ++k) simd::store(y + k * hidden + i, sums[k], lanes);
    });
  }

  void write_input_grads(const T* grad, T* grad_x, T* grad_given) const {
    simd::for_each_vector(hidden, [=, this](int64_t i, auto lanes) {
      simd::Vec grads[kStreams];
      simd::Vec of_given{};
      for (int k = 0; k < kStreams; ++k) {
        grads[k] = simd::load(grad + k * hidden + i, lanes);
        of_given += post[k] * grads[k];
      }
      simd::store(grad_given + i, of_given, lanes);
      for (int j = 0; j < kStreams; ++j) {
        simd::Vec of_stream{};
        for (int k = 0; k < kStreams; ++k) of_stream += comb[j * kStreams + k] * grads[k];
        simd::store(grad_x + j * hidden + i, of_stream, lanes);
      }
    });
  }

  /// Of one row with each stream's gradient.
  void dot_grads(const T* row, const T* grad, float* to) const {
    simd::Vec dots[kStreams] = {};
    simd::for_each_vector(hidden, [&, this](int64_t i, auto lanes) {
      const simd::Vec value = simd::load(row + i, lanes);
      for (int k = 0; k < kStreams; ++k)
        dots[k] += value * simd::load(grad + k * hidden + i, lanes);
    });
    for (int k = 0; k < kStreams; ++k) to[k] = simd::sum(dots[k]);
  }

  void write_weight_grads(const T* grad, float* grad_post, float* grad_comb) const {
    dot_grads(given, grad, grad_post);
    for (int j = 0; j < kStreams; ++j) dot_grads(x + j * hidden, grad, grad_comb + j * kStreams);
  }
};

/// Calls run<T, streams>(token) for every token.
template <typename Op, typename Run>
void for_each_token(const Args<Op>& args, Run run) {
  const Tensor& x = args.in(Op::kX);
  with_storage(x.dtype, [&](auto storage) {
    with_mixed_streams(args.in(Op::kPost).shape[1], [&]<int kStreams>() {
#pragma omp parallel for schedule(static)
      for (int64_t t = 0; t < x.shape[0]; ++t)
        run(MixedToken<decltype(storage), kStreams>::of(args, t), t);
    });
  });
}

void mix_streams(const MixStreams& /*op*/, const Args<MixStreams>& args) {
  for_each_token(args,
                 [&]<typename T, int kStreams>(const MixedToken<T, kStreams>& token, int64_t t) {
                   token.mix(args.out(MixStreams::kY).as<T>() + t * kStreams * token.hidden);
                 });
}

void mix_streams_backward(const MixStreamsBackward& /*op*/, const Args<MixStreamsBackward>& args) {
  using Op = MixStreamsBackward;
  for_each_token(
      args, [&]<typename T, int kStreams>(const MixedToken<T, kStreams>& token, int64_t t) {
        const int64_t at = t * kStreams * token.hidden;
        const T* grad = args.in(Op::kGrad).as<T>() + at;
        token.write_input_grads(grad, args.out(Op::kGradX).as<T>() + at,
                                args.out(Op::kGradGiven).as<T>() + t * token.hidden);
        token.write_weight_grads(grad, args.out(Op::kGradPost).as<float>() + t * kStreams,
                                 args.out(Op::kGradComb).as<float>() + t * kStreams * kStreams);
      });
}

}  // namespace

TESSERA_CPU_KERNELS(add_mix_streams_cpu, table) {
  add_kernel<MixStreams>(table, mix_streams);
  add_kernel<MixStreamsBackward>(table, mix_streams_backward);
}

}  // namespace tessera
