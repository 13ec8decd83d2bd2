#include "ops/block_sparse/block_sparse.h"

namespace tessera {

OperatorPtr make_block_sparse_fc1(int64_t block_size, std::vector<int64_t> first_sizes) {
  return make_block_sparse_product({.kind = ProductKind::kSdd,
                                    .block_size = block_size,
                                    .transpose_right = true,
                                    .weight = 1,
                                    .expert_sizes = std::move(first_sizes)});
}

OperatorPtr make_block_sparse_fc2(int64_t block_size, std::vector<int64_t> sizes) {
  return make_block_sparse_product({.kind = ProductKind::kDsd,
                                    .block_size = block_size,
                                    .weight = 1,
                                    .expert_sizes = std::move(sizes)});
}

void add_block_sparse_cpu(KernelTable& table) {
  add_block_topology_cpu(table);
  add_block_sparse_product_cpu(table);
  add_block_sparse_activation_cpu(table);
}

}  // namespace tessera
