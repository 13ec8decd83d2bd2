#include "ops/add_bias/add_bias.h"
#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void add_bias(const AddBias& /*op*/, const Args<AddBias>& args) {
  const Tensor& x = args.in(AddBias::kX);
  const int64_t width = x.shape[1];
  const float* bias = args.in(AddBias::kBias).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(AddBias::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.shape[0]; ++row) {
      simd::for_each_vector(width, [=](int64_t i, auto lanes) {
        simd::store(to + row * width + i,
                    simd::load(from + row * width + i, lanes) + simd::load(bias + i, lanes), lanes);
      });
    }
  });
}

void add_bias_grad(const AddBiasGrad& /*op*/, const Args<AddBiasGrad>& args) {
  using Op = AddBiasGrad;
  if (args.out(Op::kGradBias))
    add_columns_of(args.in(Op::kGrad), args.out(Op::kGradBias).as<float>(), args.workspace);
}

int64_t add_bias_grad_workspace(const AddBiasGrad& /*op*/, std::span<const ValueType> inputs) {
  return column_sums_bytes(inputs[AddBiasGrad::kGrad].shape[1]);
}

}  // namespace

TESSERA_CPU_KERNELS(add_add_bias_cpu, table) {
  add_kernel<AddBias>(table, add_bias);
  add_kernel<AddBiasGrad>(table, add_bias_grad, {.workspace = add_bias_grad_workspace});
}

}  // namespace tessera
