#include "ops/gemm/tile_products.h"

#include "ops/gemm/aligned_words.h"
#include "ops/gemm/shared_product.h"
#include "ops/gemm/tile_permission.h"

namespace tessera {
namespace {

constexpr int64_t kFewestRows = 16;
constexpr int64_t kFewestColumns = 16;
constexpr int64_t kFewestInner = 32;

void multiply(const Gemm& product) {
  thread_local AlignedWords scratch;
  multiply_on_tiles(product, scratch.at_least(tile_scratch_words()));
}

}  // namespace

bool suits_tiles(const Gemm& p) {
  return p.input_type == DType::kBF16 && p.m >= kFewestRows && p.n >= kFewestColumns &&
         p.k >= kFewestInner && may_use_tiles();
}

void gemm_on_tiles(const Gemm& p) {
  share_out_product(p, multiply);
}

}  // namespace tessera
