// The grouped products under C names, for bench/rivals/grouped_mm.py. All pointers but `stream` are
// the GPU's.
#include "ops/grouped_matmul/grouped_matmul_cuda.h"

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
}
