#include <cmath>

#include "ops/attention_sink/attention_sink.h"
#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// The share of a row's softmax that is not the sink's.
float share_of_keys(float lse, float sink) {
  return 1.0F / (1.0F + std::exp(sink - lse));
}

template <typename T>
void scale_heads(const AttentionSinkSpec& spec, const Args<AttentionSink>& args) {
  using Op = AttentionSink;
  const T* o = args.in(Op::kO).as<T>();
  const float* lse = args.in(Op::kLse).as<float>();
  const float* sinks = args.in(Op::kSinks).as<float>() + spec.first_head;
  T* y = args.out(Op::kY).as<T>();
  const int64_t num_tokens = args.in(Op::kO).shape[0];
  const int64_t size = args.in(Op::kO).shape[1] / spec.num_heads;
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t n = 0; n < spec.num_heads; ++n) {
      const float share = share_of_keys(lse[n * num_tokens + t], sinks[n]);
      const int64_t at = (t * spec.num_heads + n) * size;
      simd::for_each_vector(size, [=](int64_t i, auto lanes) {
        simd::store(y + at + i, simd::load(o + at + i, lanes) * share, lanes);
      });
    }
  }
}

/// Of one head's row: writes the gradient of o, and returns that of lse.
template <typename T>
float scale_row_backward(const T* grad, const T* o, float share, int64_t size, T* grad_o) {
  simd::Vec dot{};
  simd::for_each_vector(size, [&](int64_t i, auto lanes) {
    const simd::Vec g = simd::load(grad + i, lanes);
    dot += g * simd::load(o + i, lanes);
    simd::store(grad_o + i, g * share, lanes);
  });
  return simd::sum(dot) * share * (1.0F - share);
}

template <typename T>
void scale_heads_backward(const AttentionSinkSpec& spec, const Args<AttentionSinkBackward>& args) {
  using Op = AttentionSinkBackward;
  const T* grad = args.in(Op::kGrad).as<T>();
  const T* o = args.in(Op::kO).as<T>();
  const float* lse = args.in(Op::kLse).as<float>();
  const float* sinks = args.in(Op::kSinks).as<float>() + spec.first_head;
  T* grad_o = args.out(Op::kGradO).as<T>();
  float* grad_lse = args.out(Op::kGradLse).as<float>();
  const int64_t num_tokens = args.in(Op::kO).shape[0];
  const int64_t size = args.in(Op::kO).shape[1] / spec.num_heads;
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t n = 0; n < spec.num_heads; ++n) {
      const int64_t of_row = n * num_tokens + t;
      const int64_t at = (t * spec.num_heads + n) * size;
      grad_lse[of_row] = scale_row_backward(grad + at, o + at, share_of_keys(lse[of_row], sinks[n]),
                                            size, grad_o + at);
    }
  }
}

/// A sink takes from all rows of its head what it gives to their log-sum-exp.
void add_sink_gradients(const AttentionSinkSpec& spec, const Tensor& grad_lse, float* grad_sinks) {
  const float* rows = grad_lse.as<float>();
  const int64_t num_tokens = grad_lse.shape[1];
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < spec.num_heads; ++n) {
    double sum = 0;
    for (int64_t t = 0; t < num_tokens; ++t) sum += static_cast<double>(rows[n * num_tokens + t]);
    grad_sinks[spec.first_head + n] -= static_cast<float>(sum);
  }
}

void attention_sink(const AttentionSink& op, const Args<AttentionSink>& args) {
  with_storage(args.in(AttentionSink::kO).dtype,
               [&](auto storage) { scale_heads<decltype(storage)>(op.spec(), args); });
}

void attention_sink_backward(const AttentionSinkBackward& op,
                             const Args<AttentionSinkBackward>& args) {
  using Op = AttentionSinkBackward;
  with_storage(args.in(Op::kO).dtype,
               [&](auto storage) { scale_heads_backward<decltype(storage)>(op.spec(), args); });
  if (!args.out(Op::kGradSinks)) return;
  add_sink_gradients(op.spec(), args.out(Op::kGradLse), args.out(Op::kGradSinks).as<float>());
}

}  // namespace

TESSERA_CPU_KERNELS(add_attention_sink_cpu, table) {
  add_kernel<AttentionSink>(table, attention_sink);
  add_kernel<AttentionSinkBackward>(table, attention_sink_backward);
}

}  // namespace tessera
