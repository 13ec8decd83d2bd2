#include <omp.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/cpu_dispatch.h"
#include "ops/gemm/gemm.h"
#include "ops/newton_schulz/newton_schulz.h"

namespace tessera {
namespace {

/// Multiplications of a product up to which a matrix is left to one thread.
constexpr int64_t kOneThread = int64_t{1} << 24;
/// Elements that a thread takes at a time.
constexpr int64_t kChunk = 16384;

struct Sizes {
  int64_t rows;
  int64_t cols;
  int64_t n;  ///< the smaller of the two
  bool tall() const { return rows > cols; }
};

/// One matrix: the two places of X between which products alternate, and the rest of its scratch.
template <typename T>
struct Places {
  T* x;
  T* next;
  T* gram;
  float* square;
};

template <typename T>
constexpr DType kType = std::is_same_v<T, float> ? DType::kF32 : DType::kBF16;

template <typename Run>
void for_each_chunk(int64_t count, const Run& run) {
  const int64_t num_chunks = (count + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static) if (num_chunks > 1)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
    run(chunk * kChunk, std::min(count, (chunk + 1) * kChunk));
}

/// In one order, so that the sum does not depend on the threads.
template <typename T>
double sum_of_squares(const T* __restrict from, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const double value = static_cast<float>(from[i]);
    sum += value * value;
  }
  return sum;
}

template <typename T>
void normalize(const T* from, T* to, int64_t count) {
  const double norm = std::sqrt(sum_of_squares(from, count));
  const auto scale = static_cast<float>(1 / (norm + NewtonSchulzFactors::kEps));
  for_each_chunk(count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = T(static_cast<float>(from[i]) * scale);
  });
}

/// c [m, n] = a · b, in which both are X, or one is a matrix of the smaller size.
template <typename T>
Gemm product(const T* a, const T* b, void* c, DType to, int64_t m, int64_t n, int64_t k) {
  return {.m = m,
          .n = n,
          .k = k,
          .a = a,
          .lda = k,
          .b = b,
          .ldb = n,
          .c = c,
          .ldc = n,
          .input_type = kType<T>,
          .output_type = to};
}

template <typename T>
void find_gram(const T* x, T* gram, const Sizes& sizes) {
  const int64_t inner = std::max(sizes.rows, sizes.cols);
  Gemm gemm_x = product(x, x, gram, kType<T>, sizes.n, sizes.n, inner);
  gemm_x.transpose_a = sizes.tall();
  gemm_x.transpose_b = !sizes.tall();
  gemm_x.lda = gemm_x.ldb = sizes.cols;
  gemm(gemm_x);
}

/// to = a·I + b·gram + c·square; `to` may be `gram`.
template <typename T>
void make_polynomial(const T* gram, const float* square, T* to, int64_t n) {
  const int64_t rows = std::max<int64_t>(1, kChunk / std::max<int64_t>(n, 1));
#pragma omp parallel for schedule(static) if (n > rows)
  for (int64_t row = 0; row < n; ++row) {
    const T* const g = gram + row * n;
    T* const p = to + row * n;
    const float* const s = square + row * n;
    const float diagonal = NewtonSchulzFactors::kA +
                           NewtonSchulzFactors::kB * static_cast<float>(g[row]) +
                           NewtonSchulzFactors::kC * s[row];
    for (int64_t i = 0; i < n; ++i)
      p[i] = T(NewtonSchulzFactors::kB * static_cast<float>(g[i]) + NewtonSchulzFactors::kC * s[i]);
    p[row] = T(diagonal);
  }
}

/// to = a·b, all of the smaller size.
template <typename T>
void multiply_small(const T* a, const T* b, T* to, int64_t n) {
  gemm(product(a, b, to, kType<T>, n, n, n));
}

/// to = a·I + b·gram + c·gram².
template <typename T>
void find_polynomial(const Places<T>& at, T* to, int64_t n) {
  gemm(product(at.gram, at.gram, at.square, DType::kF32, n, n, n));
  make_polynomial(at.gram, at.square, to, n);
}

/// next = factor·X, or X·factor.
template <typename T>
void multiply_x(const Places<T>& at, const T* factor, const Sizes& sizes) {
  const T* const left = sizes.tall() ? at.x : factor;
  const T* const right = sizes.tall() ? factor : at.x;
  gemm(product(left, right, at.next, kType<T>, sizes.rows, sizes.cols, sizes.n));
}

template <typename T>
void step(const Places<T>& at, const Sizes& sizes) {
  find_gram(at.x, at.gram, sizes);
  find_polynomial(at, at.gram, sizes.n);
  multiply_x(at, at.gram, sizes);
}

template <typename T>
void step_twice(const Places<T>& at, const Sizes& sizes) {
  const int64_t n = sizes.n;
  T* const first = at.next;
  T* const moved = reinterpret_cast<T*>(at.square);
  find_gram(at.x, at.gram, sizes);
  find_polynomial(at, first, n);
  multiply_small(first, at.gram, moved, n);
  multiply_small(moved, first, at.gram, n);
  find_polynomial(at, at.gram, n);
  multiply_small(at.gram, first, moved, n);
  multiply_x(at, moved, sizes);
}

template <typename T>
void orthogonalize(const NewtonSchulz& op, const T* from, Places<T> at, const Sizes& sizes) {
  const bool pairs = NewtonSchulz::pairs_steps(sizes.rows, sizes.cols);
  // The last product writes to `x`.
  if (op.num_products(sizes.rows, sizes.cols) % 2 != 0) std::swap(at.x, at.next);
  normalize(from, at.x, sizes.rows * sizes.cols);
  for (int64_t left = op.steps(); left > 0; left -= pairs ? 2 : 1) {
    const bool twice = pairs && left > 1;
    twice ? step_twice(at, sizes) : step(at, sizes);
    std::swap(at.x, at.next);
  }
}

/// Leaves products to the calling thread.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

/// By the sizes alone, so that a matrix has the same bits in any batch: large ones are for all
/// threads, one after the other, small ones for one thread each.
template <typename Run>
void for_each_matrix(const Sizes& sizes, int64_t count, const Run& run) {
  if (sizes.rows * sizes.cols * sizes.n > kOneThread) {
    for (int64_t i = 0; i < count; ++i) run(i);
    return;
  }
#pragma omp parallel for schedule(dynamic) if (count > 1)
  for (int64_t i = 0; i < count; ++i) {
    const OneThread one;
    run(i);
  }
}

template <typename T>
void run(const NewtonSchulz& op, const KernelArgs& args) {
  const Tensor& m = args.in(NewtonSchulz::kM);
  const Shape& shape = m.shape;
  const Sizes sizes = {shape[1], shape[2], std::min(shape[1], shape[2])};
  const int64_t elements = sizes.rows * sizes.cols;
  if (elements == 0) return;
  const auto scratch = NewtonSchulz::scratch({.dtype = m.dtype, .shape = shape});
  std::byte* const memory = args.workspace.data();
  for_each_matrix(sizes, shape[0], [&](int64_t i) {
    const int64_t square = i * sizes.n * sizes.n;
    orthogonalize(op, m.as<T>() + i * elements,
                  Places<T>{.x = args.out(NewtonSchulz::kX).template as<T>() + i * elements,
                            .next = reinterpret_cast<T*>(memory + scratch.x) + i * elements,
                            .gram = reinterpret_cast<T*>(memory + scratch.gram) + square,
                            .square = reinterpret_cast<float*>(memory + scratch.square) + square},
                  sizes);
  });
}

void newton_schulz(const NewtonSchulz& op, const KernelArgs& args) {
  args.in(NewtonSchulz::kM).dtype == DType::kF32 ? run<float>(op, args) : run<Bf16>(op, args);
}

}  // namespace

TESSERA_CPU_KERNELS(add_newton_schulz_cpu, table) {
  add_kernel<NewtonSchulz>(
      table, newton_schulz,
      {.workspace = [](const NewtonSchulz&, std::span<const ValueType> inputs) {
        return NewtonSchulz::scratch(inputs[NewtonSchulz::kM]).num_bytes;
      }});
}

}  // namespace tessera
