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
  switch (dtype) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    default:
      internal_error("a product of {}", dtype_name(dtype));
  }
}

/// cuBLAS stores columns one after another: a row-major matrix is to it the transposed one.
CublasLayout make_layout(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_cublas(cublas().layout_create(&layout, data_type(dtype), static_cast<uint64_t>(columns),
                                      static_cast<uint64_t>(rows), stride));
  return CublasLayout(layout);
}

void set_batch(const CublasLayout& layout, int64_t count, int64_t stride) {
  const auto number = static_cast<int32_t>(count);
  check_cublas(cublas().layout_set(layout.get(), CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &number,
                                   sizeof(number)));
  check_cublas(cublas().layout_set(layout.get(), CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                   &stride, sizeof(stride)));
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

/// What the first operand of a batch shares with all others.
uint32_t alignment_of(const void* pointer, DType dtype, const ProductBatch& batch, int64_t stride) {
  if (batch.count == 1) return alignment_of(pointer);
  const int64_t bytes = stride * dtype_size(dtype);
  return alignment_of(
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(pointer) |  // NOLINT
                                    static_cast<uintptr_t>(bytes)));
}

struct Alignments {
  uint32_t a = 0;
  uint32_t b = 0;
  uint32_t c = 0;
  uint32_t addend = 0;  ///< 0: there is none
};

Alignments alignments_of(const Gemm& product, const void* addend, const ProductBatch& batch) {
  return {.a = alignment_of(product.a, product.input_type, batch, batch.a_stride),
          .b = alignment_of(product.b, product.input_type, batch, batch.b_stride),
          .c = alignment_of(product.c, product.output_type, batch, batch.c_stride),
          .addend = addend == nullptr ? 0 : alignment_of(addend)};
}

using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t,
                                   CublasDestroy<&CublasLibrary::preference_destroy>>;

template <typename T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  check_cublas(cublas().preference_set(preference.get(), attribute, &value, sizeof(value)));
}

Preference make_preference(const Alignments& alignments) {
  cublasLtMatmulPreference_t created = nullptr;
  check_cublas(cublas().preference_create(&created));
  Preference preference(created);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments.b);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments.a);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
      alignments.addend == 0 ? alignments.c : alignments.addend);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments.c);
  return preference;
}

}  // namespace

MatrixProducts::MatrixProducts(const CudaContext& context)
    : handle_(make_handle()),
      stream_(context.stream()),
      workspace_(kWorkspaceBytes, "matrix products") {}

MatrixProducts::Key MatrixProducts::key_of(const Gemm& product, const void* addend,
                                           const ProductBatch& batch) {
  const int flags = (product.transpose_a ? 1 : 0) | (product.transpose_b ? 2 : 0) |
                    (product.input_type == DType::kF32 ? 4 : 0) |
                    (product.output_type == DType::kF32 ? 8 : 0) | (product.accumulate ? 16 : 0) |
                    (product.input_type == DType::kF16 ? 32 : 0);
  const Alignments alignments = alignments_of(product, addend, batch);
  return {product.m,         product.n,   product.k,      product.lda,    product.ldb,
          product.ldc,       flags,       alignments.a,   alignments.b,   alignments.c,
          alignments.addend, batch.count, batch.a_stride, batch.b_stride, batch.c_stride};
}

MatrixProducts::Plan MatrixProducts::make_plan(const Gemm& product, const void* addend,
                                               const ProductBatch& batch) const {
  const auto stored = [&](bool transposed, int64_t rows, int64_t columns, int64_t stride) {
    return transposed ? make_layout(product.input_type, columns, rows, stride)
                      : make_layout(product.input_type, rows, columns, stride);
  };
  Plan plan{.operation = make_operation(product),
            .a = stored(product.transpose_a, product.m, product.k, product.lda),
            .b = stored(product.transpose_b, product.k, product.n, product.ldb),
            .c = make_layout(product.output_type, product.m, product.n, product.ldc),
            .algorithm = {}};
  if (batch.count > 1) {
    set_batch(plan.a, batch.count, batch.a_stride);
    set_batch(plan.b, batch.count, batch.b_stride);
    set_batch(plan.c, batch.count, batch.c_stride);
  }
  const Preference preference = make_preference(alignments_of(product, addend, batch));
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
  run(product, addend, {});
}

void MatrixProducts::run(const Gemm& product, const ProductBatch& batch) {
  ensure(product.k > 0 || batch.count <= 1, "a batch of {} products over nothing", batch.count);
  if (batch.count > 0) run(product, nullptr, batch);
}

void MatrixProducts::run(const Gemm& product, const void* addend, const ProductBatch& batch) {
  ensure(addend == nullptr || !product.accumulate,
         "a product that adds to its result takes no addend");
  if (product.m == 0 || product.n == 0) return;
  if (product.k == 0) return finish_empty(product, addend);
  const Key key = key_of(product, addend, batch);
  auto found = plans_.find(key);
  if (found == plans_.end()) found = plans_.emplace(key, make_plan(product, addend, batch)).first;
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

void multiply(const KernelArgs& args, const Gemm& product, const ProductBatch& batch) {
  context_of(args).get<MatrixProducts>().run(product, batch);
}

}  // namespace tessera::cuda
