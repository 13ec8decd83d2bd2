#pragma once

#include <map>
#include <memory>
#include <tuple>

#include "ops/cuda/context.h"
#include "ops/cuda/cublas_library.h"
#include "ops/cuda/device_buffer.h"
#include "ops/gemm/gemm.h"

namespace tessera::cuda {

/// Destroys an object of cuBLASLt with a function of its library.
template <auto destroy>
struct CublasDestroy {
  template <typename T>
  void operator()(T* object) const {
    (CublasLibrary::get().*destroy)(object);
  }
};
using CublasHandle = std::unique_ptr<cublasLtContext, CublasDestroy<&CublasLibrary::destroy>>;
using CublasOperation =
    std::unique_ptr<cublasLtMatmulDescOpaque_t, CublasDestroy<&CublasLibrary::operation_destroy>>;
using CublasLayout =
    std::unique_ptr<cublasLtMatrixLayoutOpaque_t, CublasDestroy<&CublasLibrary::layout_destroy>>;

/// Products of one shape, whose operands lie at equal distances, in elements.
struct ProductBatch {
  int64_t count = 1;
  int64_t a_stride = 0;
  int64_t b_stride = 0;
  int64_t c_stride = 0;

  bool operator==(const ProductBatch&) const = default;
};

/// Products of matrices on one GPU by cuBLASLt: F32 in full precision (no TF32), BF16 with F32
/// sums. How a product is computed is chosen once for its sizes, types and alignment, and kept; no
/// choice adds parts in an order that may change, nor in BF16. Got by
/// context.get<MatrixProducts>(). The products of a context share one scratch memory, which the
/// order of its stream protects.
class MatrixProducts {
 public:
  explicit MatrixProducts(const CudaContext& context);

  /// Gives the product to the context's stream. The matrices are in the GPU's memory. `addend`,
  /// unless null, lies as the result does and is added before that is rounded; the product does
  /// not accumulate then.
  void run(const Gemm& product, const void* addend = nullptr);
  /// The same with each of a batch, of which `product` is the first. How that is computed may
  /// depend on the number of products.
  void run(const Gemm& product, const ProductBatch& batch);

 private:
  struct Plan {
    CublasOperation operation;
    CublasLayout a, b, c;
    cublasLtMatmulAlgo_t algorithm;
  };
  /// Shape, leading dims, types and transposes, with the alignments of the pointers.
  /// and the batch.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, uint32_t,
                         uint32_t, uint32_t, uint32_t, int64_t, int64_t, int64_t, int64_t>;

  static Key key_of(const Gemm& product, const void* addend, const ProductBatch& batch);
  Plan make_plan(const Gemm& product, const void* addend, const ProductBatch& batch) const;
  void run(const Gemm& product, const void* addend, const ProductBatch& batch);
  void finish_empty(const Gemm& product, const void* addend) const;

  CublasHandle handle_;
  cudaStream_t stream_;
  DeviceBuffer workspace_;
  std::map<Key, Plan> plans_;
};

/// The product in the stream of a kernel's call.
void multiply(const KernelArgs& args, const Gemm& product, const void* addend = nullptr);
void multiply(const KernelArgs& args, const Gemm& product, const ProductBatch& batch);

}  // namespace tessera::cuda
