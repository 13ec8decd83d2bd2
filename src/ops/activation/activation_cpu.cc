#include "ops/activation/activation.h"
#include "ops/activation_math.h"
#include "ops/cpu_dispatch.h"
#include "ops/scaled_row_load.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using simd::load;
using simd::prefetch;
using simd::store;
using simd::Vec;

template <typename Function, typename T>
void activate_row(Function function, T* y, const T* x, int64_t width) {
  simd::for_each_vector(width, [=](int64_t i, auto lanes) {
    store(y + i, function.value(load(x + i, lanes)), lanes);
  });
}

template <typename Function, typename T>
void activate_gated_row(Function function, T* y, const T* gate, const T* up, int64_t width) {
  simd::for_each_vector(width, [=](int64_t i, auto lanes) {
    prefetch(gate + 2 * width + i);
    prefetch(up + 2 * width + i);
    store(y + i, function.value(load(gate + i, lanes)) * function.other(load(up + i, lanes)),
          lanes);
  });
}

/// x: a pointer, or a ScaledRow.
template <typename Function, typename T, typename X>
void differentiate_row(Function function, T* grad_x, X x, const T* grad, int64_t width) {
  simd::for_each_vector(width, [=](int64_t i, auto lanes) {
    const Slope slope = function.slope(load(x + i, lanes));
    store(grad_x + i, slope.derivative * load(grad + i, lanes), lanes);
  });
}

template <typename Function, typename T, typename X>
void differentiate_gated_row(Function function, T* grad_x, X x, const T* grad, int64_t width) {
  simd::for_each_vector(width, [=](int64_t i, auto lanes) {
    prefetch(x + 2 * width + i);
    prefetch(x + 3 * width + i);
    prefetch(grad + width + i);
    const Slope slope = function.slope(load(x + i, lanes));
    const Vec g = load(grad + i, lanes);
    const Vec up = load(x + width + i, lanes);
    store(grad_x + i, slope.derivative * function.other(up) * g, lanes);
    store(grad_x + width + i, function.other_grad(up, slope.value * g), lanes);
  });
}

/// Calls run(function, T{}) for the activation and the storage type `dtype`.
template <typename Run>
void specialize(const ActivationFunction& activation, DType dtype, Run run) {
  with_activation(activation, [&](auto function) {
    with_storage(dtype, [&](auto storage) { run(function, storage); });
  });
}

void activation(const ActivationOp& op, const Args<ActivationOp>& args) {
  const bool gated = is_gated(op.function().kind);
  const Tensor& x = args.in(ActivationOp::kX);
  const Tensor& y = args.out(ActivationOp::kY);
  const int64_t rows = y.shape[0];
  const int64_t width = y.shape[1];
  specialize(op.function(), x.dtype, [&](auto function, auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = y.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      if (gated) {
        const T* gate = from + row * 2 * width;
        activate_gated_row(function, to + row * width, gate, gate + width, width);
      } else {
        activate_row(function, to + row * width, from + row * width, width);
      }
    }
  });
}

template <typename T, typename Function, typename Rows>
void differentiate_rows(Function function, bool gated, const Args<ActivationBackward>& args,
                        const Rows& x) {
  using Op = ActivationBackward;
  const Tensor& grad = args.in(Op::kGrad);
  const int64_t rows = grad.shape[0];
  const int64_t width = grad.shape[1];
  const T* grad_y = grad.as<T>();
  T* grad_x = args.out(Op::kGradX).as<T>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const T* grad_row = grad_y + row * width;
    if (gated) {
      differentiate_gated_row(function, grad_x + row * 2 * width, x[row], grad_row, width);
    } else {
      differentiate_row(function, grad_x + row * width, x[row], grad_row, width);
    }
  }
}

void activation_backward(const ActivationBackward& op, const Args<ActivationBackward>& args) {
  const Tensor& x = args.in(ActivationBackward::kX);
  const DType dtype = args.in(ActivationBackward::kGrad).dtype;
  const bool gated = is_gated(op.function().kind);
  specialize(op.function(), dtype, [&](auto function, auto storage) {
    using T = decltype(storage);
    op.x_format() == RowFormat::kScaled
        ? differentiate_rows<T>(function, gated, args, ScaledRowsOf(x))
        : differentiate_rows<T>(function, gated, args, ValueRowsOf<T>(x));
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_activation_cpu, table) {
  add_kernel<ActivationOp>(table, activation);
  add_kernel<ActivationBackward>(table, activation_backward, {.takes = takes_scaled_rows});
}

}  // namespace tessera
