// The grouped products under C names, for bench/rivals/grouped_mm.py and scaled_grouped_mm.py. All
// pointers but `stream` are the GPU's.
#include "ops/grouped_matmul/grouped_matmul_cuda.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/quantize_kernels.h"
#include "ops/scaled_grouped_matmul/scaled_grouped_matmul_cuda.h"

namespace {

/// As the Python program lays it out: experts of one size.
struct Problem {
  const int* begin;
  const int64_t* offsets;
  int64_t num_experts;
  int64_t num_rows;
  int64_t inner;
  int64_t hidden;
  int* counter;

  tessera::cuda::ExpertBlocks experts() const {
    return {.num_experts = static_cast<int>(num_experts),
            .begin = begin,
            .offsets = offsets,
            .wide = hidden,
            .largest = inner,
            .total = num_experts * inner};
  }
};

}  // namespace

extern "C" {

void tessera_grouped_rows(const Problem* problem, int by_out, const void* a, const void* weight,
                          void* y, void* stream) {
  tessera::cuda::grouped_rows({.experts = problem->experts(),
                               .by_out = by_out != 0,
                               .num_rows = problem->num_rows,
                               .a = a,
                               .weight = weight,
                               .y = y,
                               .counter = problem->counter},
                              static_cast<cudaStream_t>(stream));
}

void tessera_grouped_wgrad(const Problem* problem, int accumulate, const void* narrow,
                           const void* wide, float* grad, void* stream) {
  tessera::cuda::grouped_wgrad({.experts = problem->experts(),
                                .num_rows = problem->num_rows,
                                .narrow = narrow,
                                .wide = wide,
                                .grad = grad,
                                .accumulate = accumulate != 0,
                                .counter = problem->counter},
                               static_cast<cudaStream_t>(stream));
}

/// Of E4M3 rows [R, hidden] and experts [E · inner, hidden].
void tessera_scaled_rows(const Problem* problem, int by_block, const void* a, const float* a_scales,
                         const void* weight, const float* weight_scales, void* y, void* stream) {
  tessera::cuda::scaled_rows({.experts = problem->experts(),
                              .by_block = by_block != 0,
                              .num_rows = problem->num_rows,
                              .a = a,
                              .a_scales = a_scales,
                              .weight = weight,
                              .weight_scales = weight_scales,
                              .y = y,
                              .counter = problem->counter},
                             static_cast<cudaStream_t>(stream));
}

/// Of BF16 rows, to E4M3.
void tessera_quantize(int64_t num_rows, int64_t num_columns, int64_t block_rows,
                      int64_t block_columns, const void* x, void* y, float* scales, void* stream) {
  tessera::cuda::launch_quantize({.dtype = tessera::DType::kBF16,
                                  .element = tessera::DType::kE4M3,
                                  .x = x,
                                  .y = y,
                                  .scales = scales,
                                  .num_rows = num_rows,
                                  .num_columns = num_columns,
                                  .block_rows = block_rows,
                                  .block_columns = block_columns,
                                  .extent = nullptr},
                                 static_cast<cudaStream_t>(stream));
}
}
