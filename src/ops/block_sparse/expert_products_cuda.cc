#include "ops/block_sparse/expert_products.h"

#include <algorithm>

#include "ops/block_sparse/expert_kernels.h"
#include "ops/cuda/tensor_map.h"
#include "ops/grouped_matmul/grouped_tile_rule.h"

namespace tessera::cuda {
namespace {

/// The different sizes.
std::vector<int64_t> widths_of(const ExpertSizes& sizes) {
  std::vector<int64_t> widths = sizes.values();
  std::ranges::sort(widths);
  widths.erase(std::unique(widths.begin(), widths.end()), widths.end());
  return widths;
}

ExpertValues describe_values(const ExpertMatrix& matrix, int box_rows) {
  const DeviceTopology& topology = matrix.topology;
  const int64_t block = topology.block_size;
  ExpertValues values = {.col_offsets = topology.col_offsets,
                         .row_indices = topology.row_indices,
                         .block_size = topology.block_size,
                         .widths = {},
                         .maps = {}};
  size_t i = 0;
  for (const int64_t width : widths_of(matrix.sizes)) {
    values.widths[i] = static_cast<int>(width);
    values.maps[i++] = make_blocks_map({.data = matrix.values,
                                        .num_values = topology.max_blocks * block * block,
                                        .num_columns = width},
                                       box_rows);
  }
  return values;
}

}  // namespace

bool fits_expert_products(const ExpertMatrix& matrix,
                          std::initializer_list<const void*> dense_matrices) {
  const auto is_aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  return matrix.topology.block_size % kExpertBlockMultiple == 0 && matrix.topology.max_blocks > 0 &&
         widths_of(matrix.sizes).size() <= kMaxExpertWidths &&
         runs_in_tiles({.dtype = DType::kBF16,
                        .num_experts = matrix.sizes.num_experts(),
                        .wide = matrix.experts.wide,
                        .largest = matrix.sizes.largest()}) &&
         is_aligned(matrix.values) && std::ranges::all_of(dense_matrices, is_aligned);
}

void expert_rows(const ExpertRows& product, cudaStream_t stream) {
  const ExpertBlocks& experts = product.matrix.experts;
  const DeviceMatrix dense = {product.dense, product.num_rows, experts.wide};
  const DeviceMatrix weight = {product.weight,
                               product.weight_by_rows ? experts.total : experts.wide,
                               product.weight_by_rows ? experts.wide : experts.total};
  // Along features the weight's rows fill a tile at once.
  const bool features_are_rows = product.gives_values == product.weight_by_rows;
  ExpertRowsParams params = {};
  params.weight = make_tensor_map(weight, features_are_rows ? kGroupedFeatures : kGroupedReduction);
  (product.gives_values ? params.a : params.y_map) =
      make_tensor_map(dense, product.gives_values ? kGroupedBoxRows : kGroupedStoreRows);
  params.y = const_cast<void*>(product.dense);
  params.y_columns = static_cast<int>(experts.wide);
  params.values =
      describe_values(product.matrix, product.gives_values ? kGroupedStoreRows : kGroupedBoxRows);
  set_experts(params, experts, product.counter);
  launch_expert_rows(params, product.gives_values, product.weight_by_rows, stream);
}

void expert_wgrad(const ExpertWgrad& product, cudaStream_t stream) {
  const ExpertBlocks& experts = product.matrix.experts;
  ExpertWgradParams params = {};
  (product.grad_by_rows ? params.wide : params.narrow) =
      make_tensor_map({product.dense, product.num_rows, experts.wide}, kGroupedReduction);
  params.grad = product.grad;
  params.block_begin = experts.begin;
  params.num_experts = experts.num_experts;
  params.num_columns = static_cast<int>(product.grad_by_rows ? experts.wide : experts.total);
  params.num_rows = product.num_rows;
  params.weight_rows = experts.total;
  params.accumulate = product.accumulate;
  params.counter = product.counter;
  params.dense_columns = static_cast<int>(experts.wide);
  params.values = describe_values(product.matrix, kGroupedReduction);
  launch_expert_wgrad(params, product.grad_by_rows, stream);
}

}  // namespace tessera::cuda
