#pragma once

#include <unordered_map>

#include "ops/gemm/gemm.h"
#include "ops/gemm/matmul_primitive.h"

namespace tessera {

/// One thread's oneDNN products that were made for their sizes. With the tile registers of AMX
/// these are up to twice as fast as products whose sizes come at run time (docs/log.md,
/// 2026-11-24), but making one takes 0.1 ms and more, so shapes must recur: `fixed_rows` says how a
/// product with any number of rows is cut.
class ShapedProducts {
 public:
  explicit ShapedProducts(const dnnl::engine& engine) : engine_(engine) {}

  /// Runs a product on `stream` and waits; false, with nothing done, where oneDNN has none for it.
  bool run(const Gemm& product, dnnl::stream& stream);

 private:
  struct Hash {
    size_t operator()(const MatmulShape& shape) const;
  };
  const dnnl::matmul& find(const MatmulShape& shape);

  dnnl::engine engine_;
  std::unordered_map<MatmulShape, dnnl::matmul, Hash> products_;
};

/// Whether this product, or the rows of it that `fixed_rows` counts, should be run by
/// ShapedProducts: BF16 inputs on a processor with AMX, and not the gradient of a weight, whose sum
/// is as long as there are tokens.
bool prefers_fixed_shape(const Gemm& product);

/// The rows of the next part of a product with `rows` left: the largest power of two of at least
/// 128, or 0 where fewer are left, which a product of any size takes. So there are few shapes,
/// whatever the routing.
int64_t fixed_rows(int64_t rows);

}  // namespace tessera
