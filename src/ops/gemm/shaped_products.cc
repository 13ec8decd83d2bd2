#include "ops/gemm/shaped_products.h"

#include <bit>

#include "core/process/cpu_level.h"

namespace tessera {
namespace {

constexpr int64_t kFewestRows = 128;
/// Beyond this many shapes of one thread all are forgotten, so that memory stays bounded.
constexpr size_t kMostShapes = 128;

MatmulShape shape_of(const Gemm& p) {
  return {.a = {p.m, p.k, p.lda, p.transpose_a},
          .b = {p.k, p.n, p.ldb, p.transpose_b},
          .c = {p.m, p.n, p.ldc, false},
          .input_type = p.input_type,
          .output_type = p.output_type,
          .accumulate = p.accumulate};
}

}  // namespace

size_t ShapedProducts::Hash::operator()(const MatmulShape& shape) const {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;  // 2^64 / the golden ratio
  uint64_t hash = shape.accumulate ? 1 : 0;
  for (const MatrixLayout& layout : {shape.a, shape.b, shape.c}) {
    for (const int64_t part :
         {layout.rows, layout.cols, layout.leading_dim, int64_t{layout.transposed}}) {
      hash = (hash ^ static_cast<uint64_t>(part)) * kFactor;
      hash ^= hash >> 32;
    }
  }
  return hash ^ static_cast<size_t>(shape.output_type);
}

const dnnl::matmul& ShapedProducts::find(const MatmulShape& shape) {
  if (const auto found = products_.find(shape); found != products_.end()) return found->second;
  if (products_.size() >= kMostShapes) products_.clear();
  return products_.emplace(shape, make_matmul(shape, engine_)).first->second;
}

bool ShapedProducts::run(const Gemm& product, dnnl::stream& stream) {
  const MatmulShape shape = shape_of(product);
  const dnnl::matmul& matmul = find(shape);
  if (!matmul) return false;
  // oneDNN takes sources as void* but only reads them.
  const dnnl::memory a(shape.a.desc(shape.input_type), engine_, const_cast<void*>(product.a));
  const dnnl::memory b(shape.b.desc(shape.input_type), engine_, const_cast<void*>(product.b));
  const dnnl::memory c(shape.c.desc(shape.output_type), engine_, product.c);
  matmul.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
  stream.wait();
  return true;
}

bool prefers_fixed_shape(const Gemm& product) {
  return product.input_type == DType::kBF16 && !product.transpose_a && cpu_has_matrix_tiles();
}

int64_t fixed_rows(int64_t rows) {
  return rows < kFewestRows ? 0 : static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(rows)));
}

bool cpu_has_matrix_tiles() {
  return cpu_level() == CpuLevel::kAmx;
}

}  // namespace tessera
