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

/// to = a·b, all [n, n] of the smaller size; `to` of the batch's type or F32.
void multiply_small(const KernelArgs& args, const Batch& batch, const void* a, const void* b,
                    void* to, DType to_type) {
  const int64_t n = batch.n;
  const Gemm product = {.m = n,
                        .n = n,
                        .k = n,
                        .a = a,
                        .lda = n,
                        .b = b,
                        .ldb = n,
                        .c = to,
                        .ldc = n,
                        .input_type = batch.dtype,
                        .output_type = to_type};
  cuda::multiply(args, product, cuda::ProductBatch{batch.count, n * n, n * n, n * n});
}

/// to = a·I + b·gram + c·gram²; `to` may be `gram`.
void find_polynomials(const KernelArgs& args, const Batch& batch, void* to) {
  multiply_small(args, batch, batch.gram, batch.gram, batch.square, DType::kF32);
  cuda::launch_polynomial(batch.dtype, batch.gram, batch.square, to, batch.count, batch.n,
                          cuda::stream_of(args));
}

/// next = factor·X, or X·factor.
void multiply_x(const KernelArgs& args, const Batch& batch, const void* factor, const void* x,
                void* next) {
  const bool tall = batch.tall();
  const int64_t square = batch.n * batch.n;
  const Gemm product = {.m = batch.rows,
                        .n = batch.cols,
                        .k = batch.n,
                        .a = tall ? x : factor,
                        .lda = batch.n,
                        .b = tall ? factor : x,
                        .ldb = batch.cols,
                        .c = next,
                        .ldc = batch.cols,
                        .input_type = batch.dtype,
                        .output_type = batch.dtype};
  cuda::multiply(args, product,
                 cuda::ProductBatch{batch.count, tall ? batch.elements() : square,
                                    tall ? square : batch.elements(), batch.elements()});
}

void step(const KernelArgs& args, const Batch& batch, const void* x, void* next) {
  find_grams(args, batch, x);
  find_polynomials(args, batch, batch.gram);
  multiply_x(args, batch, batch.gram, x, next);
}

void step_twice(const KernelArgs& args, const Batch& batch, const void* x, void* next) {
  void* const first = next;
  void* const moved = batch.square;
  find_grams(args, batch, x);
  find_polynomials(args, batch, first);
  multiply_small(args, batch, first, batch.gram, moved, batch.dtype);
  multiply_small(args, batch, moved, first, batch.gram, batch.dtype);
  find_polynomials(args, batch, batch.gram);
  multiply_small(args, batch, batch.gram, first, moved, batch.dtype);
  multiply_x(args, batch, moved, x, next);
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
  // The last product writes to the output.
  if (op.num_products(batch.rows, batch.cols) % 2 != 0) std::swap(x, next);
  cuda::launch_normalize(m.dtype, m.data, x, reinterpret_cast<double*>(memory + scratch.sums),
                         batch.count, batch.elements(), cuda::stream_of(args));
  const bool pairs = NewtonSchulz::pairs_steps(batch.rows, batch.cols);
  for (int64_t left = op.steps(); left > 0; left -= pairs ? 2 : 1) {
    const bool twice = pairs && left > 1;
    twice ? step_twice(args, batch, x, next) : step(args, batch, x, next);
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
