#include <cmath>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/gated_norm/gated_norm.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Gates of a vector, of which share is the sigmoid.
struct SiluGate {
  static simd::Vec value(simd::Vec z, simd::Vec share) { return z * share; }
  static simd::Vec slope(simd::Vec z, simd::Vec share) {
    return share * (1.0F + z * (1.0F - share));
  }
};
struct PlainGate {
  static simd::Vec value(simd::Vec /*z*/, simd::Vec share) { return share; }
  static simd::Vec slope(simd::Vec /*z*/, simd::Vec share) { return share * (1.0F - share); }
};

/// Calls run(storage, gate) with values of the types for rows of `dtype` and that gate.
template <typename Run>
void with_gate(DType dtype, NormGate gate, Run run) {
  with_storage(dtype, [&](auto storage) {
    gate == NormGate::kSilu ? run(storage, SiluGate{}) : run(storage, PlainGate{});
  });
}

/// 1 / sqrt(mean(x²) + eps).
template <typename T>
float inverse_deviation(const T* x, int64_t size, float eps) {
  simd::Vec squares{};
  simd::for_each_vector(size, [&](int64_t i, auto lanes) {
    const simd::Vec value = simd::load(x + i, lanes);
    squares += value * value;
  });
  return 1.0F / std::sqrt(simd::sum(squares) / static_cast<float>(size) + eps);
}

void gated_norm(const GatedNorm& op, const Args<GatedNorm>& args) {
  using Op = GatedNorm;
  const Tensor& x = args.in(Op::kX);
  const float* weight = args.in(Op::kWeight).as<float>();
  const int64_t size = args.in(Op::kWeight).shape[0];
  const int64_t rows = x.num_elements() / size;
  const float eps = op.eps();
  with_gate(x.dtype, op.gate(), [&](auto storage, auto gate) {
    using T = decltype(storage);
    using Gate = decltype(gate);
    const T* from = x.as<T>();
    const T* gates = args.in(Op::kZ).as<T>();
    T* to = args.out(Op::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * size;
      const float rstd = inverse_deviation(from + at, size, eps);
      simd::for_each_vector(size, [&](int64_t i, auto lanes) {
        const simd::Vec z = simd::load(gates + at + i, lanes);
        const simd::Vec normed =
            simd::load(from + at + i, lanes) * rstd * simd::load(weight + i, lanes);
        simd::store(to + at + i, normed * Gate::value(z, simd::sigmoid(z)), lanes);
      });
    }
  });
}

/// One head of one token.
template <typename T, typename Gate>
struct GatedRow {
  const T* x;
  const T* z;
  const T* grad;
  const float* weight;
  int64_t size;
  float rstd;

  /// Writes the gradient of z, adds the weight's, and returns the sum over the head of the normed
  /// x's gradient times x.
  float add_weight_grads(T* grad_z, float* sums) const {
    simd::Vec dot{};
    simd::for_each_vector(size, [&](int64_t i, auto lanes) {
      const simd::Vec logit = simd::load(z + i, lanes);
      const simd::Vec share = simd::sigmoid(logit);
      const simd::Vec gate = Gate::value(logit, share);
      const simd::Vec g = simd::load(grad + i, lanes);
      const simd::Vec value = simd::load(x + i, lanes);
      const simd::Vec w = simd::load(weight + i, lanes);
      const simd::Vec of_weight = g * gate * value * rstd;
      simd::store(sums + i, simd::load(sums + i, lanes) + of_weight, lanes);
      dot += g * gate * w * value;
      simd::store(grad_z + i, g * value * rstd * w * Gate::slope(logit, share), lanes);
    });
    return simd::sum(dot);
  }

  void write_grad(T* grad_x, float dot) const {
    const float shift = dot * rstd * rstd / static_cast<float>(size);
    simd::for_each_vector(size, [&](int64_t i, auto lanes) {
      const simd::Vec logit = simd::load(z + i, lanes);
      const simd::Vec of_normed = simd::load(grad + i, lanes) *
                                  Gate::value(logit, simd::sigmoid(logit)) *
                                  simd::load(weight + i, lanes);
      simd::store(grad_x + i, (of_normed - simd::load(x + i, lanes) * shift) * rstd, lanes);
    });
  }
};

void gated_norm_backward(const GatedNormBackward& op, const Args<GatedNormBackward>& args) {
  using Op = GatedNormBackward;
  const Tensor& x = args.in(Op::kX);
  const float* weight = args.in(Op::kWeight).as<float>();
  const int64_t size = args.in(Op::kWeight).shape[0];
  float* accumulator = args.out(Op::kGradWeight) ? args.out(Op::kGradWeight).as<float>() : nullptr;
  const float eps = op.eps();
  with_gate(x.dtype, op.gate(), [&](auto storage, auto gate) {
    using T = decltype(storage);
    using Gate = decltype(gate);
    const T* from = x.as<T>();
    const T* gates = args.in(Op::kZ).as<T>();
    const T* grads = args.in(Op::kGrad).as<T>();
    T* grad_x = args.out(Op::kGradX).as<T>();
    T* grad_z = args.out(Op::kGradZ).as<T>();
    add_column_sums(
        accumulator, x.num_elements() / size, size, args.workspace, [=](int64_t row, float* sums) {
          const int64_t at = row * size;
          const GatedRow<T, Gate> terms{from + at,  gates + at,
                                        grads + at, weight,
                                        size,       inverse_deviation(from + at, size, eps)};
          terms.write_grad(grad_x + at, terms.add_weight_grads(grad_z + at, sums));
        });
  });
}

int64_t gated_norm_backward_workspace(const GatedNormBackward& /*op*/,
                                      std::span<const ValueType> inputs) {
  return column_sums_bytes(inputs[GatedNormBackward::kWeight].shape[0]);
}

}  // namespace

TESSERA_CPU_KERNELS(add_gated_norm_cpu, table) {
  add_kernel<GatedNorm>(table, gated_norm);
  add_kernel<GatedNormBackward>(table, gated_norm_backward,
                                {.workspace = gated_norm_backward_workspace});
}

}  // namespace tessera
