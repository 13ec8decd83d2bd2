#pragma once

#include "ops/block_sparse/block_sparse_activation.h"
#include "ops/block_sparse/block_sparse_product.h"
#include "ops/block_sparse/block_topology.h"
#include "ops/block_sparse/topology.h"

/// Experts as block-sparse products (MegaBlocks, Gale et al., 2022), over the same inputs and
/// weights as the grouped path: rows_RH padded to multiples of the block size B per expert
/// (route_map's alignment), offsets I64 [E + 1], W1 [Σ g_e, H] with g_e = F_e or, gated, 2·F_e
/// (gate rows, then up rows), W2 [Σ F_e, H], probs_R F32 [R]. The inner sizes F_e may differ; each
/// is a multiple of B. A layer is the program
///
///     t1   = add(make_block_topology({B, {g_e}, max_rows}), {offsets})
///     t2   = add(make_block_topology({B, {F_e}, max_rows}), {offsets})
///     pre  = add(make_block_sparse_fc1(B, {g_e}), {rows_RH, W1, t1[0..4]})
///     act  = add(make_block_sparse_activation({activation, B}), {pre, probs_R, t2[0], t2[1]})
///     y_RH = add(make_block_sparse_fc2(B, {F_e}), {act, W2, t2[0..4], probs_R})
///
/// where max_rows is the bound of R, t[0..4] are the topology's tensors (t[5] is their extent),
/// fc2 takes from probs_R the number of rows alone, and t2 is t1 where nothing is gated.
///
/// The derived gradients are SDDᵀ (data) and DSᵀD (weight) for fc2, DSD and DSᵀD for fc1; with W1
/// stored [H, inner], as the paper has it, the latter would be its DSDᵀ and DDᵀS. Weight gradients
/// are accumulated in F32.
namespace tessera {

/// pre = SDDᵀ(rows_RH, W1). `first_sizes`: g_e; see BlockSparseProductSpec::expert_sizes.
OperatorPtr make_block_sparse_fc1(int64_t block_size, std::vector<int64_t> first_sizes);
/// y_RH = DSD(act, W2). `sizes`: F_e.
OperatorPtr make_block_sparse_fc2(int64_t block_size, std::vector<int64_t> sizes);

void add_block_sparse_cpu(KernelTable& table);
void add_block_sparse_cuda(KernelTable& table);

}  // namespace tessera
