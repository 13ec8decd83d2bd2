#pragma once

#include "ops/block_sparse/block_sparse_activation.h"
#include "ops/block_sparse/block_sparse_product.h"
#include "ops/block_sparse/block_topology.h"
#include "ops/block_sparse/topology.h"

/// Experts as block-sparse products (MegaBlocks, Gale et al., 2022). Over the same inputs and
/// weights as the grouped path: rows_RH padded to multiples of the block size B per expert
/// (route_map's alignment), offsets I64 [E + 1], W1 [Σ g_e, H] with g_e = F_e or, gated, 2·F_e
/// (gate rows, then up rows), W2 [Σ F_e, H], probs_R F32 [R]. The inner sizes F_e may differ; each
/// is a multiple of B. With F2 = {F_e} and F1 = {g_e}, a layer is
///
///     topology1 = add(make_block_topology({B, F1, max_rows}), {offsets})        6 outputs: 5
///     tensors and nnz topology2 = add(make_block_topology({B, F2, max_rows}), {offsets})        F1
///     = F2: use topology1 again pre = add(make_block_sparse_fc1(B), {rows_RH, W1,
///     topology1[0..4]}) act = add(make_block_sparse_activation({activation, B}), {pre, probs_R,
///     topology2[0], topology2[1]}) y_RH = add(make_block_sparse_fc2(B), {act, W2, topology2[0..4],
///     probs_R})
///
/// where probs_R gives fc2 its number of rows alone. max_rows is the bound of R. The gradients,
/// derived, are DSᵀD and SDDᵀ for fc2, and DSᵀD and DSD for fc1 (W1 lies transposed beside the
/// paper's, whose DDᵀS and DSDᵀ they are), weight gradients accumulated in F32.
namespace tessera {

/// pre = SDDᵀ(rows_RH, W1).
OperatorPtr make_block_sparse_fc1(int64_t block_size);
/// y_RH = DSD(act, W2).
OperatorPtr make_block_sparse_fc2(int64_t block_size);

void add_block_sparse_cpu(KernelTable& table);

}  // namespace tessera
