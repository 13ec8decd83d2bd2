#include <algorithm>
#include <cmath>

#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/storage.h"
#include "ops/stream_logits/stream_logits.h"

namespace tessera {
namespace {

/// Tokens that share what is read of the weight. No token's sums depend on the others.
constexpr int64_t kTokensAtOnce = 4;
/// Columns of the weight's gradient that a thread takes at a time.
constexpr int64_t kGradColumns = 64;

/// Sizes of a call: T tokens, W elements of all their streams, M logits.
struct StreamSizes {
  int64_t tokens;
  int64_t width;
  int64_t logits;

  template <typename Op>
  static StreamSizes of(const Args<Op>& args) {
    const Shape& x = args.in(Op::kX).shape;
    return {x[0], x[1], args.in(Op::kWeight).shape[0]};
  }
  int64_t num_groups() const { return (tokens + kTokensAtOnce - 1) / kTokensAtOnce; }
};

/// Of one token too few of a group, the last one's rows are read again, and nothing is stored.
template <typename T>
struct TokenRows {
  const T* at[kTokensAtOnce];
  int64_t count;

  TokenRows(const T* rows, const StreamSizes& s, int64_t first)
      : count(std::min(kTokensAtOnce, s.tokens - first)) {
    for (int64_t i = 0; i < kTokensAtOnce; ++i)
      at[i] = rows + (first + std::min(i, count - 1)) * s.width;
  }
};

/// rstd of a row.
template <typename T>
float inverse_deviation(const T* x, int64_t width, float eps) {
  simd::Vec squares{};
  simd::for_each_vector(width, [&](int64_t i, auto lanes) {
    const simd::Vec v = simd::load(x + i, lanes);
    squares += v * v;
  });
  return 1.0F / std::sqrt(simd::sum(squares) / static_cast<float>(width) + eps);
}

/// Products of a group's rows with one row of the weight.
template <typename T>
void dot_rows(const TokenRows<T>& rows, const float* weight, int64_t width,
              float (&dots)[kTokensAtOnce]) {
  simd::Vec sums[kTokensAtOnce] = {};
  simd::for_each_vector(width, [&](int64_t i, auto lanes) {
    const simd::Vec w = simd::load(weight + i, lanes);
    for (int64_t t = 0; t < kTokensAtOnce; ++t) sums[t] += simd::load(rows.at[t] + i, lanes) * w;
  });
  for (int64_t t = 0; t < kTokensAtOnce; ++t) dots[t] = simd::sum(sums[t]);
}

template <typename T>
void make_logits(const StreamLogits& op, const Args<StreamLogits>& args) {
  using Op = StreamLogits;
  const auto s = StreamSizes::of<Op>(args);
  const T* x = args.in(Op::kX).as<T>();
  const float* weight = args.in(Op::kWeight).as<float>();
  float* logits = args.out(Op::kLogits).as<float>();
  float* rstd = args.out(Op::kRstd).as<float>();
#pragma omp parallel for schedule(static)
  for (int64_t group = 0; group < s.num_groups(); ++group) {
    const int64_t first = group * kTokensAtOnce;
    const TokenRows<T> rows(x, s, first);
    for (int64_t t = 0; t < rows.count; ++t)
      rstd[first + t] = inverse_deviation(rows.at[t], s.width, op.eps());
    for (int64_t m = 0; m < s.logits; ++m) {
      float dots[kTokensAtOnce];
      dot_rows(rows, weight + m * s.width, s.width, dots);
      for (int64_t t = 0; t < rows.count; ++t)
        logits[(first + t) * s.logits + m] = rstd[first + t] * dots[t];
    }
  }
}

void stream_logits(const StreamLogits& op, const Args<StreamLogits>& args) {
  with_storage(args.in(StreamLogits::kX).dtype,
               [&](auto storage) { make_logits<decltype(storage)>(op, args); });
}

/// One backward call. With u = rstd · grad, dx = u · weight - x · rstd²/W · Σ grad · logits, the
/// latter from rstd.
struct StreamGradCall {
  StreamSizes sizes;
  const float* weight_MW;
  const float* logits_TM;
  const float* rstd_T;
  const float* grad_TM;
  float* scaled_TM;  ///< u

  void scale() const {
    for (int64_t t = 0; t < sizes.tokens; ++t) {
      for (int64_t m = 0; m < sizes.logits; ++m)
        scaled_TM[t * sizes.logits + m] = rstd_T[t] * grad_TM[t * sizes.logits + m];
    }
  }
  /// What x is multiplied by.
  float pull_of(int64_t token) const {
    float dot = 0;
    for (int64_t m = 0; m < sizes.logits; ++m)
      dot += grad_TM[token * sizes.logits + m] * logits_TM[token * sizes.logits + m];
    return rstd_T[token] * rstd_T[token] / static_cast<float>(sizes.width) * dot;
  }
};

template <typename T>
void write_x_grads(const StreamGradCall& c, const T* x, const T* addend, T* grad_x) {
  const StreamSizes& s = c.sizes;
#pragma omp parallel for schedule(static)
  for (int64_t group = 0; group < s.num_groups(); ++group) {
    const int64_t first = group * kTokensAtOnce;
    const TokenRows<T> rows(x, s, first);
    float pulls[kTokensAtOnce] = {};
    const float* scaled[kTokensAtOnce];
    for (int64_t t = 0; t < kTokensAtOnce; ++t) {
      const int64_t token = first + std::min(t, rows.count - 1);
      pulls[t] = c.pull_of(token);
      scaled[t] = c.scaled_TM + token * s.logits;
    }
    simd::for_each_vector(s.width, [&](int64_t i, auto lanes) {
      simd::Vec sums[kTokensAtOnce];
      for (int64_t t = 0; t < kTokensAtOnce; ++t)
        sums[t] = -pulls[t] * simd::load(rows.at[t] + i, lanes);
      for (int64_t m = 0; m < s.logits; ++m) {
        const simd::Vec w = simd::load(c.weight_MW + m * s.width + i, lanes);
        for (int64_t t = 0; t < kTokensAtOnce; ++t) sums[t] += scaled[t][m] * w;
      }
      for (int64_t t = 0; t < rows.count; ++t) {
        const int64_t at = (first + t) * s.width + i;
        if (addend != nullptr) sums[t] = simd::load(addend + at, lanes) + sums[t];
        simd::store(grad_x + at, sums[t], lanes);
      }
    });
  }
}

/// grad_weight += uᵀ · x. Threads have columns of their own, and add tokens in their order.
template <typename T>
void add_weight_grads(const StreamGradCall& c, const T* x, float* grad_weight_MW) {
  const StreamSizes& s = c.sizes;
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < s.width; begin += kGradColumns) {
    const int64_t columns = std::min(kGradColumns, s.width - begin);
    for (int64_t t = 0; t < s.tokens; ++t) {
      const T* row = x + t * s.width + begin;
      for (int64_t m = 0; m < s.logits; ++m) {
        const float u = c.scaled_TM[t * s.logits + m];
        float* sums = grad_weight_MW + m * s.width + begin;
        simd::for_each_vector(columns, [=](int64_t i, auto lanes) {
          simd::store(sums + i, simd::load(sums + i, lanes) + u * simd::load(row + i, lanes),
                      lanes);
        });
      }
    }
  }
}

void stream_logits_backward(const StreamLogitsBackward& op,
                            const Args<StreamLogitsBackward>& args) {
  using Op = StreamLogitsBackward;
  const StreamGradCall call{.sizes = StreamSizes::of<Op>(args),
                            .weight_MW = args.in(Op::kWeight).as<float>(),
                            .logits_TM = args.in(Op::kLogits).as<float>(),
                            .rstd_T = args.in(Op::kRstd).as<float>(),
                            .grad_TM = args.in(Op::kGrad).as<float>(),
                            .scaled_TM = reinterpret_cast<float*>(args.workspace.data())};
  call.scale();
  with_storage(args.in(Op::kX).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* x = args.in(Op::kX).as<T>();
    write_x_grads<T>(call, x, op.addend() ? args.in(Op::kAddend).as<T>() : nullptr,
                     args.out(Op::kGradX).as<T>());
    if (args.out(Op::kGradWeight))
      add_weight_grads<T>(call, x, args.out(Op::kGradWeight).as<float>());
  });
}

int64_t stream_logits_backward_workspace(const StreamLogitsBackward& /*op*/,
                                         std::span<const ValueType> inputs) {
  return inputs[StreamLogitsBackward::kGrad].num_bytes();
}

}  // namespace

TESSERA_CPU_KERNELS(add_stream_logits_cpu, table) {
  add_kernel<StreamLogits>(table, stream_logits);
  add_kernel<StreamLogitsBackward>(table, stream_logits_backward,
                                   {.workspace = stream_logits_backward_workspace});
}

}  // namespace tessera
