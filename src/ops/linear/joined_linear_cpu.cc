#include "ops/gemm/gemm.h"
#include "ops/linear/joined_linear.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void joined_linear(const JoinedLinear& op, const KernelArgs& args) {
  const Tensor& x = args.in(JoinedLinear::kX);
  for (int i = 0; i < op.count(); ++i) {
    const Tensor& weight = args.in(JoinedLinear::kFirstWeight + i);
    gemm({.transpose_b = true,
          .m = x.shape[0],
          .n = weight.shape[0],
          .k = weight.shape[1],
          .a = x.data,
          .lda = weight.shape[1],
          .b = weight.data,
          .ldb = weight.shape[1],
          .c = args.out(i).data,
          .ldc = weight.shape[0],
          .input_type = x.dtype,
          .output_type = x.dtype});
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
  auto* const product = reinterpret_cast<float*>(args.workspace.data());
  const Tensor* addend = op.addend() ? &args.in(2 * op.count()) : nullptr;
  for (int i = 0; i < op.count(); ++i) {
    const Tensor& grad = args.in(2 * i);
    const Tensor& weight = args.in(2 * i + 1);
    gemm({.m = grad.shape[0],
          .n = weight.shape[1],
          .k = weight.shape[0],
          .a = grad.data,
          .lda = grad.shape[1],
          .b = weight.data,
          .ldb = weight.shape[1],
          .c = product,
          .ldc = weight.shape[1],
          .input_type = grad.dtype});
    add_product(product, addend, grad_x);
    addend = &grad_x;
  }
}

void joined_linear_wgrad(const JoinedLinearWgrad& op, const KernelArgs& args) {
  const Tensor& x = args.in(JoinedLinearWgrad::kX);
  for (int i = 0; i < op.count(); ++i) {
    const Tensor& grad = args.in(JoinedLinearWgrad::kFirstGrad + i);
    if (!args.out(i)) continue;
    gemm({.transpose_a = true,
          .m = grad.shape[1],
          .n = x.shape[1],
          .k = x.shape[0],
          .a = grad.data,
          .lda = grad.shape[1],
          .b = x.data,
          .ldb = x.shape[1],
          .c = args.out(i).data,
          .ldc = x.shape[1],
          .input_type = x.dtype,
          .accumulate = !args.set_accumulators});
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
