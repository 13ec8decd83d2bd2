#include "ops/linear/joined_linear.h"
#include "ops/linear/linear_products.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void joined_linear(const JoinedLinear& op, const KernelArgs& args) {
  const Tensor& x = args.in(JoinedLinear::kX);
  for (int i = 0; i < op.count(); ++i) {
    Gemm product = forward_product(x, args.in(JoinedLinear::kFirstWeight + i));
    product.c = args.out(i).data;
    gemm(product);
  }
}

/// to = product + addend, rounded; without an addend, the product.
void add_product(const float* product, const Tensor* addend, const Tensor& to) {
  with_storage(to.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* const other = addend == nullptr ? nullptr : addend->as<T>();
    T* const out = to.as<T>();
    const int64_t count = to.num_elements();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; ++i)
      out[i] = T(product[i] + (other == nullptr ? 0.0F : static_cast<float>(other[i])));
  });
}

void joined_linear_dgrad(const JoinedLinearDgrad& op, const KernelArgs& args) {
  const Tensor& grad_x = args.out(JoinedLinearDgrad::kGradX);
  auto* const summand = reinterpret_cast<float*>(args.workspace.data());
  const Tensor* addend = op.addend() ? &args.in(2 * op.count()) : nullptr;
  for (int i = 0; i < op.count(); ++i) {
    Gemm product = input_grad_product(args.in(2 * i), args.in(2 * i + 1));
    product.output_type = DType::kF32;
    product.c = summand;
    gemm(product);
    add_product(summand, addend, grad_x);
    addend = &grad_x;
  }
}

void joined_linear_wgrad(const JoinedLinearWgrad& op, const KernelArgs& args) {
  const Tensor& x = args.in(JoinedLinearWgrad::kX);
  for (int i = 0; i < op.count(); ++i) {
    if (!args.out(i)) continue;
    Gemm product = weight_grad_product(x, args.in(JoinedLinearWgrad::kFirstGrad + i));
    product.c = args.out(i).data;
    product.accumulate = !args.set_accumulators;
    gemm(product);
  }
}

/// A product in F32.
int64_t joined_linear_dgrad_workspace(const JoinedLinearDgrad& /*op*/,
                                      std::span<const ValueType> inputs) {
  return inputs[JoinedLinearDgrad::kFirstGrad].shape[0] *
         inputs[JoinedLinearDgrad::kFirstWeight].shape[1] * dtype_size(DType::kF32);
}

}  // namespace

void add_joined_linear_cpu(KernelTable& table) {
  add_kernel<JoinedLinear>(table, joined_linear);
  add_kernel<JoinedLinearDgrad>(table, joined_linear_dgrad,
                                {.workspace = joined_linear_dgrad_workspace});
  add_kernel<JoinedLinearWgrad>(table, joined_linear_wgrad, {.sets_accumulators = true});
}

}  // namespace tessera
