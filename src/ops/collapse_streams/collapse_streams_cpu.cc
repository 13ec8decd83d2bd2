#include "ops/collapse_streams/collapse_streams.h"
#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

template <typename T>
void collapse_row(const T* x, const float* pre, int64_t streams, int64_t hidden, T* y) {
  simd::for_each_vector(hidden, [=](int64_t i, auto lanes) {
    simd::Vec sum{};
    for (int64_t j = 0; j < streams; ++j) sum += pre[j] * simd::load(x + j * hidden + i, lanes);
    simd::store(y + i, sum, lanes);
  });
}

void collapse_streams(const CollapseStreams& /*op*/, const Args<CollapseStreams>& args) {
  using Op = CollapseStreams;
  const Tensor& x = args.in(Op::kX);
  const int64_t streams = args.in(Op::kPre).shape[1];
  const int64_t hidden = x.shape[1] / streams;
  const float* pre = args.in(Op::kPre).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < x.shape[0]; ++t) {
      collapse_row(x.as<T>() + t * x.shape[1], pre + t * streams, streams, hidden,
                   args.out(Op::kY).as<T>() + t * hidden);
    }
  });
}

/// One stream of a token.
template <typename T>
struct StreamGrad {
  const T* x;
  const T* grad;
  const T* addend;  ///< or null
  float weight;
  int64_t hidden;

  /// Returns the gradient of the weight.
  float write(T* grad_x) const {
    simd::Vec dots{};
    simd::for_each_vector(hidden, [&, this](int64_t i, auto lanes) {
      const simd::Vec g = simd::load(grad + i, lanes);
      dots += g * simd::load(x + i, lanes);
      simd::Vec own = weight * g;
      if (addend != nullptr) own = simd::load(addend + i, lanes) + own;
      simd::store(grad_x + i, own, lanes);
    });
    return simd::sum(dots);
  }
};

void collapse_streams_backward(const CollapseStreamsBackward& op,
                               const Args<CollapseStreamsBackward>& args) {
  using Op = CollapseStreamsBackward;
  const Tensor& x = args.in(Op::kX);
  const int64_t streams = args.in(Op::kPre).shape[1];
  const int64_t hidden = x.shape[1] / streams;
  const float* pre = args.in(Op::kPre).as<float>();
  float* grad_pre = args.out(Op::kGradPre).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* addend = op.addend() ? args.in(Op::kAddend).as<T>() : nullptr;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < x.shape[0] * streams; ++i) {
      const int64_t at = i * hidden;
      const StreamGrad<T> stream{x.as<T>() + at, args.in(Op::kGrad).as<T>() + i / streams * hidden,
                                 addend == nullptr ? nullptr : addend + at, pre[i], hidden};
      grad_pre[i] = stream.write(args.out(Op::kGradX).as<T>() + at);
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_collapse_streams_cpu, table) {
  add_kernel<CollapseStreams>(table, collapse_streams);
  add_kernel<CollapseStreamsBackward>(table, collapse_streams_backward);
}

}  // namespace tessera
