#include <algorithm>
#include <utility>

#include "ops/cuda/matrix_product.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "ops/newton_schulz/newton_schulz_kernels.h"

namespace tessera {
namespace {

/// A batch of matrices, and where its scratch memory is.
struct Batch {
  DType dtype;
  int64_t count;
  int64_t rows;
  int64_t cols;
  int64_t n;  ///< the smaller of the two
  std::byte* gram;
  float* square;

  bool tall() const { return rows > cols; }
  int64_t elements() const { return rows * cols; }
};

/// gram = X·Xᵀ, or Xᵀ·X.
void find_grams(const KernelArgs& args, const Batch& batch, const void* x) {
  const Gemm product = {.transpose_a = batch.tall(),
                        .transpose_b = !batch.tall(),
                        .m = batch.n,
                        .n = batch.n,
                        .k = std::max(batch.rows, batch.cols),
                        .a = x,
                        .lda = batch.cols,
                        .b = x,
                        .ldb = batch.cols,
                        .c = batch.gram,
                        .ldc = batch.n,
                        .input_type = batch.dtype,
                        .output_type = batch.dtype};
  cuda::multiply(
      args, product,
      cuda::ProductBatch{batch.count, batch.elements(), batch.elements(), batch.n * batch.n});
}

void find_squares(const KernelArgs& args, const Batch& batch) {
  const int64_t n = batch.n;
  const Gemm product = {.m = n,
                        .n = n,
                        .k = n,
                        .a = batch.gram,
                        .lda = n,
                        .b = batch.gram,
                        .ldb = n,
                        .c = batch.square,
                        .ldc = n,
                        .input_type = batch.dtype};
  cuda::multiply(args, product, cuda::ProductBatch{batch.count, n * n, n * n, n * n});
}

/// next = gram·X, or X·gram.
void find_next(const KernelArgs& args, const Batch& batch, const void* x, void* next) {
  const bool tall = batch.tall();
  const int64_t square = batch.n * batch.n;
  const Gemm product = {.m = batch.rows,
                        .n = batch.cols,
                        .k = batch.n,
                        .a = tall ? x : batch.gram,
                        .lda = batch.n,
                        .b = tall ? batch.gram : x,
                        .ldb = batch.cols,
                        .c = next,
                        .ldc = batch.cols,
                        .input_type = batch.dtype,
                        .output_type = batch.dtype};
  cuda::multiply(args, product,
                 cuda::ProductBatch{batch.count, tall ? batch.elements() : square,
                                    tall ? square : batch.elements(), batch.elements()});
}

void newton_schulz(const NewtonSchulz& op, const KernelArgs& args) {
  const Tensor& m = args.in(NewtonSchulz::kM);
  const Shape& shape = m.shape;
  if (shape.num_elements() == 0) return;
  const auto scratch = NewtonSchulz::scratch({.dtype = m.dtype, .shape = shape});
  std::byte* const memory = args.workspace.data();
  const Batch batch = {.dtype = m.dtype,
                       .count = shape[0],
                       .rows = shape[1],
                       .cols = shape[2],
                       .n = std::min(shape[1], shape[2]),
                       .gram = memory + scratch.gram,
                       .square = reinterpret_cast<float*>(memory + scratch.square)};
  void* x = args.out(NewtonSchulz::kX).data;
  void* next = memory + scratch.x;
  // The last step writes to the output.
  if (op.steps() % 2 != 0) std::swap(x, next);
  cuda::launch_normalize(m.dtype, m.data, x, reinterpret_cast<double*>(memory + scratch.sums),
                         batch.count, batch.elements(), cuda::stream_of(args));
  for (int64_t step = 0; step < op.steps(); ++step) {
    find_grams(args, batch, x);
    find_squares(args, batch);
    cuda::launch_polynomial(m.dtype, batch.gram, batch.square, batch.count, batch.n,
                            cuda::stream_of(args));
    find_next(args, batch, x, next);
    std::swap(x, next);
  }
}

}  // namespace

void add_newton_schulz_cuda(KernelTable& table) {
  add_kernel<NewtonSchulz>(
      table, newton_schulz,
      {.workspace = [](const NewtonSchulz&, std::span<const ValueType> inputs) {
        return NewtonSchulz::scratch(inputs[NewtonSchulz::kM]).num_bytes;
      }});
}

}  // namespace tessera
