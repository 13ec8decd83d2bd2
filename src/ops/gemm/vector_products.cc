#include "ops/gemm/vector_products.h"

#include "core/process/cpu_level.h"
#include "ops/gemm/aligned_words.h"
#include "ops/gemm/shared_product.h"

namespace tessera {
namespace {

constexpr int64_t kFewestRows = 16;
constexpr int64_t kFewestColumns = 16;
constexpr int64_t kFewestInner = 16;

void multiply(const Gemm& product) {
  thread_local AlignedWords scratch;
  multiply_on_vectors(product, scratch.at_least(vector_scratch_words()));
}

}  // namespace

bool suits_vectors(const Gemm& p) {
  return p.input_type == DType::kF32 && p.m >= kFewestRows && p.n >= kFewestColumns &&
         p.k >= kFewestInner && cpu_level() >= CpuLevel::kAvx512;
}

void gemm_on_vectors(const Gemm& p) {
  share_out_product(p, multiply);
}

}  // namespace tessera
