#pragma once

#include <cstdint>

#include "ops/gemm/gemm.h"

namespace tessera {

/// Words of scratch memory, at a multiple of 64 bytes, for multiply_on_vectors.
int64_t vector_scratch_words();

/// Runs a product of F32 on this thread's vector registers. REQUIRES extents of at least 1.
void multiply_on_vectors(const Gemm& product, uint32_t* scratch);

/// Whether gemm_on_vectors takes a product: F32 inputs, large enough that packing pays, and
/// registers of AVX-512.
bool suits_vectors(const Gemm& product);

/// The same on all threads (share_out_product).
void gemm_on_vectors(const Gemm& product);

}  // namespace tessera
