#include "ops/activation/activation.h"
#include "ops/activation_math.h"
#include "ops/cpu_dispatch.h"
#include "ops/scaled_row_load.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using simd::load;
using simd::store;
using simd::Vec;

template <typename Function, typename T>
void activate_row(T* y, const T* x, int64_t width) {
  simd::for_each_vector(width, [=](int64_t i, auto lanes) {
    store(y + i, Function::value(load(x + i, lanes)), lanes);
  });
}

template <typename Function, typename T>
void activate_gated_row(T* y, const T* gate, const T* up, int64_t width) {
  simd::for_each_vector(width, [=](int64_t i, auto lanes) {
    store(y + i, Function::value(load(gate + i, lanes)) * Function::other(load(up + i, lanes)),
          lanes);
  });
}

/// x: a pointer, or a ScaledRow.
template <typename Function, typename T, typename X>
void differentiate_row(T* grad_x, X x, const T* grad, int64_t width) {
  simd::for_each_vector(width, [=](int64_t i, auto lanes) {
    const Slope slope = Function::slope(load(x + i, lanes));
    store(grad_x + i, slope.derivative * load(grad + i, lanes), lanes);
  });
}

template <typename Function, typename T, typename X>
void differentiate_gated_row(T* grad_x, X x, const T* grad, int64_t width) {
  simd::for_each_vector(width, [=](int64_t i, auto lanes) {
    const Slope slope = Function::slope(load(x + i, lanes));
    const Vec g = load(grad + i, lanes);
    const Vec up = load(x + width + i, lanes);
    store(grad_x + i, slope.derivative * Function::other(up) * g, lanes);
    store(grad_x + width + i, Function::other_grad(up, slope.value * g), lanes);
  });
}

/// Calls run(function, T{}) for the function of `kind` and the storage type `dtype`.
template <typename Run>
void specialize(Activation kind, DType dtype, Run run) {
  with_activation(kind, [&](auto function) {
    with_storage(dtype, [&](auto storage) { run(function, storage); });
  });
}

void activation(const ActivationOp& op, const Args<ActivationOp>& args) {
  const Activation kind = op.kind();
  const Tensor& x = args.in(ActivationOp::kX);
  const Tensor& y = args.out(ActivationOp::kY);
  const int64_t rows = y.shape[0];
  const int64_t width = y.shape[1];
  specialize(kind, x.dtype, [&](auto function, auto storage) {
    using Function = decltype(function);
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = y.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      if (is_gated(kind)) {
        const T* gate = from + row * 2 * width;
        activate_gated_row<Function>(to + row * width, gate, gate + width, width);
      } else {
        activate_row<Function>(to + row * width, from + row * width, width);
      }
    }
  });
}

template <typename Function, typename T, typename Rows>
void differentiate_rows(Activation kind, const Args<ActivationBackward>& args, const Rows& x) {
  using Op = ActivationBackward;
  const Tensor& grad = args.in(Op::kGrad);
  const int64_t rows = grad.shape[0];
  const int64_t width = grad.shape[1];
  const T* grad_y = grad.as<T>();
  T* grad_x = args.out(Op::kGradX).as<T>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const T* grad_row = grad_y + row * width;
    if (is_gated(kind)) {
      differentiate_gated_row<Function>(grad_x + row * 2 * width, x[row], grad_row, width);
    } else {
      differentiate_row<Function>(grad_x + row * width, x[row], grad_row, width);
    }
  }
}

void activation_backward(const ActivationBackward& op, const Args<ActivationBackward>& args) {
  const Tensor& x = args.in(ActivationBackward::kX);
  const DType dtype = args.in(ActivationBackward::kGrad).dtype;
  specialize(op.kind(), dtype, [&](auto function, auto storage) {
    using Function = decltype(function);
    using T = decltype(storage);
    op.x_format() == RowFormat::kScaled
        ? differentiate_rows<Function, T>(op.kind(), args, ScaledRowsOf(x))
        : differentiate_rows<Function, T>(op.kind(), args, ValueRowsOf<T>(x));
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_activation_cpu, table) {
  add_kernel<ActivationOp>(table, activation);
  add_kernel<ActivationBackward>(table, activation_backward, {.takes = takes_scaled_rows});
}

}  // namespace tessera
