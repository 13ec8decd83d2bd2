#include <algorithm>
#include <cmath>

#include "ops/cpu_dispatch.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

float sigmoid_of(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

/// log(1 + e^x), without overflow.
float softplus_of(float x) {
  return std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x)));
}

float gate_of(GateFunction function, float logit) {
  if (function == GateFunction::kIdentity) return logit;
  return function == GateFunction::kSoftplus ? softplus_of(logit) : sigmoid_of(logit);
}

/// The gradient of a logit with that gate, of the sum of gradients times values.
float grad_of(GateFunction function, float logit, float gate, float sum) {
  if (function == GateFunction::kIdentity) return sum;
  return function == GateFunction::kSoftplus ? sum * sigmoid_of(logit) : sum * gate * (1.0F - gate);
}

/// G; factors are of whole rows.
int64_t groups_of(const Tensor& logit) {
  return logit.shape.rank() == 1 ? 1 : logit.shape[1];
}

/// What one logit, of type L, gates is a row of `y` seen as [rows · G, H / G].
template <typename T, typename L>
void gate_rows(const SigmoidGate& op, const Args<SigmoidGate>& args) {
  using Op = SigmoidGate;
  const T* y = args.in(Op::kX).as<T>();
  const L* logit = args.in(Op::kLogit).as<L>();
  T* out = args.out(Op::kY).as<T>();
  const int64_t groups = groups_of(args.in(Op::kLogit));
  const int64_t width = args.in(Op::kX).shape.last() / groups;
  const int64_t rows = args.in(Op::kX).shape[0] * groups;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float gate = gate_of(op.spec().function, logit[row]);
    const int64_t at = row * width;
    simd::for_each_vector(width, [&](int64_t i, auto lanes) {
      simd::store(out + at + i, simd::load(y + at + i, lanes) * gate, lanes);
    });
  }
}

template <typename T, typename L>
void gate_rows_backward(const SigmoidGateBackward& op, const Args<SigmoidGateBackward>& args) {
  using Op = SigmoidGateBackward;
  const T* y = args.in(Op::kX).as<T>();
  const L* logit = args.in(Op::kLogit).as<L>();
  const T* grad = args.in(Op::kGrad).as<T>();
  T* grad_y = args.out(Op::kGradX).as<T>();
  L* grad_logit = args.out(Op::kGradLogit).as<L>();
  const int64_t groups = groups_of(args.in(Op::kLogit));
  const int64_t width = args.in(Op::kX).shape.last() / groups;
  const int64_t rows = args.in(Op::kX).shape[0] * groups;
  const GateFunction function = op.spec().function;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float gate = gate_of(function, logit[row]);
    const int64_t at = row * width;
    simd::Vec dot{};
    simd::for_each_vector(width, [&](int64_t i, auto lanes) {
      const simd::Vec g = simd::load(grad + at + i, lanes);
      dot += g * simd::load(y + at + i, lanes);
      simd::store(grad_y + at + i, g * gate, lanes);
    });
    const float sum = simd::sum(dot);
    grad_logit[row] = L(grad_of(function, logit[row], gate, sum));
  }
}

template <typename T>
void gate_elements(const Args<SigmoidGate>& args) {
  using Op = SigmoidGate;
  const Tensor& x = args.in(Op::kX);
  const T* y = x.as<T>();
  const T* logit = args.in(Op::kLogit).as<T>();
  T* out = args.out(Op::kY).as<T>();
  const int64_t width = x.shape.last();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < x.shape[0]; ++row) {
    const int64_t at = row * width;
    simd::for_each_vector(width, [&](int64_t i, auto lanes) {
      const simd::Vec gate = simd::sigmoid(simd::load(logit + at + i, lanes));
      simd::store(out + at + i, simd::load(y + at + i, lanes) * gate, lanes);
    });
  }
}

template <typename T>
void gate_elements_backward(const Args<SigmoidGateBackward>& args) {
  using Op = SigmoidGateBackward;
  const Tensor& x = args.in(Op::kX);
  const T* y = x.as<T>();
  const T* logit = args.in(Op::kLogit).as<T>();
  const T* grad = args.in(Op::kGrad).as<T>();
  T* grad_y = args.out(Op::kGradX).as<T>();
  T* grad_logit = args.out(Op::kGradLogit).as<T>();
  const int64_t width = x.shape.last();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < x.shape[0]; ++row) {
    const int64_t at = row * width;
    simd::for_each_vector(width, [&](int64_t i, auto lanes) {
      const simd::Vec gate = simd::sigmoid(simd::load(logit + at + i, lanes));
      const simd::Vec of_gated = simd::load(grad + at + i, lanes) * gate;
      const simd::Vec value = simd::load(y + at + i, lanes);
      simd::store(grad_y + at + i, of_gated, lanes);
      simd::store(grad_logit + at + i, of_gated * value * (1.0F - gate), lanes);
    });
  }
}

/// Whether vectors of elements have vectors of gates; rows of one element are gated as rows, as are
/// elements by functions that vectors do not have.
bool gates_elements(const GateSpec& spec, const Tensor& y, const Tensor& logit) {
  return spec.function == GateFunction::kSigmoid && logit.shape[1] != 1 &&
         logit.shape[1] == y.shape[1];
}

void sigmoid_gate_kernel(const SigmoidGate& op, const Args<SigmoidGate>& args) {
  using Op = SigmoidGate;
  const bool elements = gates_elements(op.spec(), args.in(Op::kX), args.in(Op::kLogit));
  with_storage(args.out(Op::kY).dtype, [&](auto storage) {
    using T = decltype(storage);
    if (op.spec().function == GateFunction::kIdentity) return gate_rows<T, float>(op, args);
    elements ? gate_elements<T>(args) : gate_rows<T, T>(op, args);
  });
}

void sigmoid_gate_backward_kernel(const SigmoidGateBackward& op,
                                  const Args<SigmoidGateBackward>& args) {
  using Op = SigmoidGateBackward;
  const bool elements = gates_elements(op.spec(), args.in(Op::kX), args.in(Op::kLogit));
  with_storage(args.out(Op::kGradX).dtype, [&](auto storage) {
    using T = decltype(storage);
    if (op.spec().function == GateFunction::kIdentity)
      return gate_rows_backward<T, float>(op, args);
    elements ? gate_elements_backward<T>(args) : gate_rows_backward<T, T>(op, args);
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_sigmoid_gate_cpu, table) {
  add_kernel<SigmoidGate>(table, sigmoid_gate_kernel);
  add_kernel<SigmoidGateBackward>(table, sigmoid_gate_backward_kernel);
}

}  // namespace tessera
