#pragma once

#include <string>
#include <vector>

#include "model/build/layer_builder.h"
#include "ops/grouped_matmul/grouped_matmul.h"

namespace tessera {

/// The experts that this rank holds, and of each its part of the inner columns.
struct ExpertShare {
  IndexRange experts;
  std::vector<int64_t> sizes;        ///< inner columns here, of the local experts
  std::vector<int64_t> first_sizes;  ///< rows of the first matrix here: gate and up where gated
};

ExpertShare expert_share(const LayerBuilder& builder);

/// The rows of the local experts in the weight of all of them, whose experts have `parts` blocks of
/// F_e rows each: of each block the share's.
Slice expert_rows(const LayerBuilder& builder, const ExpertShare& share, int64_t parts);

/// A product with the local experts' blocks of a matrix.
struct ExpertProduct {
  std::string matrix;  ///< its name, without ".weight"
  ValueId weight;
  GroupedSide side = GroupedSide::kOut;
  int64_t parts = 1;  ///< blocks of F_e rows that an expert has
};

/// x, rows in the order of the experts, times the matrix; with its adapters where it has any. FC1
/// reads x [R, width] by A [E·r, width] and writes by B [Σ g_e, r]; FC2 reads x [R, F] by A
/// [Σ F_e, r] and writes by B [E·r, width]. Gate and up are one matrix and share their A.
ValueId multiply_by_experts(LayerBuilder& builder, const ExpertShare& share,
                            const ExpertProduct& product, ValueId x, ValueId offsets,
                            const std::string& result);

}  // namespace tessera
