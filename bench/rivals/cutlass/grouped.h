#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

/// CUTLASS's grouped products with arrays of pointers (Hopper), for bench/rivals/grouped_mm.py.
namespace rival {

enum class Schedule : int { kCooperative, kPingpong };

/// Experts of one size, as grouped_mm.py lays them out. Matrices are the GPU's, BF16 except for the
/// gradient, which is F32: wide [rows, hidden], narrow [rows, inner], weights [experts, inner,
/// hidden].
struct Problem {
  const int64_t* offsets;  ///< [num_experts + 1], of the host
  int64_t num_experts;
  int64_t inner;
  int64_t hidden;
  const void* a;
  const void* b;
  void* y;
  Schedule schedule;
  int swizzle;     ///< CUTLASS's max_swizzle_size
  int accumulate;  ///< of gradients: added to y
};

/// A product with all that it needs in the GPU's memory: pointers, sizes, strides and workspace.
class Product {
 public:
  virtual ~Product() = default;
  virtual void run(cudaStream_t stream) = 0;
};

/// narrow = wide · W_eᵀ. All throw std::runtime_error for what CUTLASS or CUDA refuses.
std::unique_ptr<Product> make_by_out(const Problem& problem);
/// wide = narrow · W_e
std::unique_ptr<Product> make_by_in(const Problem& problem);
/// The gradient of the weights, narrow_eᵀ · wide_e.
std::unique_ptr<Product> make_wgrad(const Problem& problem);

}  // namespace rival
