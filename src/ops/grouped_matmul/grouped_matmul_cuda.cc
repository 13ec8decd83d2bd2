#include "ops/grouped_matmul/grouped_matmul_cuda.h"

#include "core/error.h"
#include "ops/cuda/check.h"
#include "ops/cuda/tensor_map.h"
#include "ops/grouped_matmul/grouped_kernels.h"

namespace tessera::cuda {
namespace {

void check_experts(const ExpertBlocks& experts) {
  ensure(experts.num_experts <= kGroupedMaxExperts, "grouped product of {} experts, at most {}",
         experts.num_experts, kGroupedMaxExperts);
}

}  // namespace

int num_clusters() {
  int device = 0;
  int count = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count / 2;
}

void grouped_rows(const GroupedRows& product, cudaStream_t stream) {
  const ExpertBlocks& experts = product.experts;
  check_experts(experts);
  if (product.num_rows == 0) return;
  const int64_t a_columns = product.by_out ? experts.wide : experts.largest;
  const int64_t y_columns = product.by_out ? experts.largest : experts.wide;
  const GroupedRowsParams params = {
      .weight = make_tensor_map({product.weight, experts.total, experts.wide}, MapType::kBf16,
                                product.by_out ? kGroupedFeatures : kGroupedReduction),
      .a = make_tensor_map({product.a, product.num_rows, a_columns}, MapType::kBf16,
                           kGroupedBoxRows),
      .y_map = make_tensor_map({product.y, product.num_rows, y_columns}, MapType::kBf16,
                               kGroupedStoreRows),
      .y = product.y,
      .block_begin = experts.begin,
      .offsets = experts.offsets,
      .num_experts = experts.num_experts,
      .wide = static_cast<int>(experts.wide),
      .y_columns = static_cast<int>(y_columns)};
  launch_grouped_rows(params, product.by_out, stream);
}

void grouped_wgrad(const GroupedWgrad& product, cudaStream_t stream) {
  const ExpertBlocks& experts = product.experts;
  check_experts(experts);
  const GroupedWgradParams params = {
      .narrow = make_tensor_map({product.narrow, product.num_rows, experts.largest}, MapType::kBf16,
                                kGroupedReduction),
      .wide = make_tensor_map({product.wide, product.num_rows, experts.wide}, MapType::kBf16,
                              kGroupedReduction),
      .grad = product.grad,
      .block_begin = experts.begin,
      .offsets = experts.offsets,
      .num_experts = experts.num_experts,
      .num_columns = static_cast<int>(experts.wide),
      .accumulate = product.accumulate};
  launch_grouped_wgrad(params, stream);
}

}  // namespace tessera::cuda

namespace tessera {

void add_grouped_matmul_cuda(KernelTable& /*table*/) {}

}  // namespace tessera
