#include "ops/add/add.h"

namespace tessera {
namespace {

template <typename T>
void add_elements(const Tensor& a, const Tensor& b, const Tensor& out) {
  const T* left = a.as<T>();
  const T* right = b.as<T>();
  T* sum = out.as<T>();
  const int64_t count = out.num_elements();
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < count; ++i) sum[i] = T(static_cast<float>(left[i]) + static_cast<float>(right[i]));
}

void add_kernel(const Operator& /*op*/, const KernelArgs& args) {
  if (args.out(0).dtype == DType::kF32) {
    add_elements<float>(args.in(0), args.in(1), args.out(0));
  } else {
    add_elements<Bf16>(args.in(0), args.in(1), args.out(0));
  }
}

}  // namespace

void add_add_cpu(KernelTable& table) { table["add"] = add_kernel; }

}  // namespace tessera
