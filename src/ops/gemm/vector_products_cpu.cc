#include "ops/cpu_dispatch.h"
#include "ops/gemm/vector_product.h"
#include "ops/gemm/vector_products.h"

namespace tessera {

TESSERA_LEVELED(void, multiply_on_vectors, (const Gemm& product, uint32_t* scratch),
                (product, scratch)) {
  panel::VectorProduct(product, reinterpret_cast<float*>(scratch)).run();
}

TESSERA_LEVELED(int64_t, vector_scratch_words, (), ()) {
  return panel::VectorScratch::kFloats;
}

}  // namespace tessera
