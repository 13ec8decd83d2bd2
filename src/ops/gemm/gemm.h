#pragma once

#include <cstdint>
#include <string_view>

#include "core/tensor.h"

namespace tessera {

/// C[m, n] = A·B, or C += A·B, row-major with leading dimensions in elements, accumulated in FP32.
/// A is [m, k] (transpose_a: stored [k, m]); B is [k, n] (transpose_b: stored [n, k]).
/// Types: A and B both F32, BF16 or F16; C is F32 or, for BF16 inputs, also BF16 (accumulate needs
/// F32). Products of F16 are those of F32, which has all its values. m, n or k may be 0: k = 0
/// gives zeros (or leaves C where it accumulates).
struct Gemm {
  bool transpose_a = false;
  bool transpose_b = false;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* a = nullptr;
  int64_t lda = 0;
  const void* b = nullptr;
  int64_t ldb = 0;
  void* c = nullptr;
  int64_t ldc = 0;
  DType input_type = DType::kF32;
  DType output_type = DType::kF32;
  bool accumulate = false;
};

/// Runs one product on all threads of the caller's OpenMP team setting (serially inside a parallel
/// region): of BF16 on tile registers where there are some (tile_products.h), else through oneDNN.
/// Deterministic for one thread count. Thread-safe.
void gemm(const Gemm& product);

/// oneDNN's name for the instructions that its products use, "avx512_core_amx" with AMX: what the
/// processor has, up to TESSERA_CPU.
std::string_view matrix_instructions();

}  // namespace tessera
