#include "ops/add_bias/add_bias.h"
#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void add_bias(const Operator& /*op*/, const KernelArgs& args) {
  const Tensor& x = args.in(0);
  const int64_t width = x.shape[1];
  const float* bias = args.in(1).as<float>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(0).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.shape[0]; ++row) {
      simd::for_each_vector(width, [=](int64_t i, auto lanes) {
        simd::store(to + row * width + i,
                    simd::load(from + row * width + i, lanes) + simd::load(bias + i, lanes), lanes);
      });
    }
  });
}

void add_bias_grad(const Operator& /*op*/, const KernelArgs& args) {
  if (args.out(0)) add_columns_of(args.in(0), args.out(0).as<float>(), args.workspace);
}

}  // namespace

TESSERA_CPU_KERNELS(add_add_bias_cpu, table) {
  table["add_bias"] = add_bias;
  table["add_bias_grad"] = add_bias_grad;
}

}  // namespace tessera
