#include "ops/cuda/matrix_product.h"

#include <algorithm>
#include <bit>

namespace tessera::cuda {
namespace {

/// What NVIDIA advises for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;
/// No algorithm asks for more.
constexpr uint32_t kMaxAlignment = 16;

const CublasLibrary& cublas() {
  return CublasLibrary::get();
}

void check_cublas(cublasStatus_t status) {
  cublas().check(status);
}

CublasHandle make_handle() {
  cublasLtHandle_t handle = nullptr;
  check_cublas(cublas().create(&handle));
  return CublasHandle(handle);
}

cudaDataType_t data_type(DType dtype) {
  ensure(is_storage(dtype), "a product of {}", dtype_name(dtype));
  return dtype == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF;
}

/// cuBLAS stores columns one after another: a row-major matrix is to it the transposed one.
CublasLayout make_layout(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_cublas(cublas().layout_create(&layout, data_type(dtype), static_cast<uint64_t>(columns),
                                      static_cast<uint64_t>(rows), stride));
  return CublasLayout(layout);
}

template <typename T>
void set(const CublasOperation& operation, cublasLtMatmulDescAttributes_t attribute,
         const T& value) {
  check_cublas(cublas().operation_set(operation.get(), attribute, &value, sizeof(value)));
}

/// The transposed result is bᵀ · aᵀ, so cuBLAS's first operand is our b.
CublasOperation make_operation(const Gemm& product) {
  cublasLtMatmulDesc_t created = nullptr;
  check_cublas(cublas().operation_create(&created, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  CublasOperation operation(created);
  const auto transposed = [](bool yes) { return yes ? CUBLAS_OP_T : CUBLAS_OP_N; };
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, transposed(product.transpose_b));
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, transposed(product.transpose_a));
  return operation;
}

uint32_t alignment_of(const void* pointer) {
  const int zeros = std::countr_zero(reinterpret_cast<uintptr_t>(pointer) | kMaxAlignment);
  return 1U << static_cast<unsigned>(zeros);
}

using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t,
                                   CublasDestroy<&CublasLibrary::preference_destroy>>;

template <typename T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  check_cublas(cublas().preference_set(preference.get(), attribute, &value, sizeof(value)));
}

Preference make_preference(const Gemm& product, const void* addend) {
  cublasLtMatmulPreference_t created = nullptr;
  check_cublas(cublas().preference_create(&created));
  Preference preference(created);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(product.b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(product.a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
      alignment_of(addend == nullptr ? product.c : addend));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(product.c));
  return preference;
}

}  // namespace

MatrixProducts::MatrixProducts(const CudaContext& context)
    : handle_(make_handle()),
      stream_(context.stream()),
      workspace_(kWorkspaceBytes, "matrix products") {}

MatrixProducts::Key MatrixProducts::key_of(const Gemm& product, const void* addend) {
  const int flags = (product.transpose_a ? 1 : 0) | (product.transpose_b ? 2 : 0) |
                    (product.input_type == DType::kF32 ? 4 : 0) |
                    (product.output_type == DType::kF32 ? 8 : 0) | (product.accumulate ? 16 : 0);
  return {product.m,
          product.n,
          product.k,
          product.lda,
          product.ldb,
          product.ldc,
          flags,
          alignment_of(product.a),
          alignment_of(product.b),
          alignment_of(product.c),
          addend == nullptr ? 0 : alignment_of(addend)};
}

MatrixProducts::Plan MatrixProducts::make_plan(const Gemm& product, const void* addend) const {
  const auto stored = [&](bool transposed, int64_t rows, int64_t columns, int64_t stride) {
    return transposed ? make_layout(product.input_type, columns, rows, stride)
                      : make_layout(product.input_type, rows, columns, stride);
  };
  Plan plan{.operation = make_operation(product),
            .a = stored(product.transpose_a, product.m, product.k, product.lda),
            .b = stored(product.transpose_b, product.k, product.n, product.ldb),
            .c = make_layout(product.output_type, product.m, product.n, product.ldc),
            .algorithm = {}};
  const Preference preference = make_preference(product, addend);
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t status =
      cublas().find_algorithm(handle_.get(), plan.operation.get(), plan.b.get(), plan.a.get(),
                              plan.c.get(), plan.c.get(), preference.get(), 1, &best, &found);
  ensure(status == CUBLAS_STATUS_SUCCESS && found == 1,
         "cuBLASLt has no product of {} x {} x {}, {} to {}: {}", product.m, product.n, product.k,
         dtype_name(product.input_type), dtype_name(product.output_type),
         cublas().status_string(status));
  plan.algorithm = best.algo;
  return plan;
}

/// A product over nothing is zero.
void MatrixProducts::finish_empty(const Gemm& product, const void* addend) const {
  if (product.accumulate) return;
  const size_t value_bytes = dtype_size(product.output_type);
  const auto pitch = static_cast<size_t>(product.ldc) * value_bytes;
  const auto width = static_cast<size_t>(product.n) * value_bytes;
  const size_t height = product.m;
  check(addend == nullptr ? cudaMemset2DAsync(product.c, pitch, 0, width, height, stream_)
                          : cudaMemcpy2DAsync(product.c, pitch, addend, pitch, width, height,
                                              cudaMemcpyDeviceToDevice, stream_));
}

void MatrixProducts::run(const Gemm& product, const void* addend) {
  ensure(addend == nullptr || !product.accumulate,
         "a product that adds to its result takes no addend");
  if (product.m == 0 || product.n == 0) return;
  if (product.k == 0) return finish_empty(product, addend);
  const Key key = key_of(product, addend);
  auto found = plans_.find(key);
  if (found == plans_.end()) found = plans_.emplace(key, make_plan(product, addend)).first;
  const Plan& plan = found->second;
  const float alpha = 1;
  const float beta = product.accumulate || addend != nullptr ? 1 : 0;
  check_cublas(cublas().multiply(
      handle_.get(), plan.operation.get(), &alpha, product.b, plan.b.get(), product.a, plan.a.get(),
      &beta, addend == nullptr ? product.c : addend, plan.c.get(), product.c, plan.c.get(),
      &plan.algorithm, workspace_.as<void>(), workspace_.num_bytes(), stream_));
}

void multiply(const KernelArgs& args, const Gemm& product, const void* addend) {
  context_of(args).get<MatrixProducts>().run(product, addend);
}

}  // namespace tessera::cuda
