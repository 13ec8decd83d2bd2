#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

constexpr int kMostJoined = 4;       ///< products
constexpr int kJoinedRows = 128;     ///< of a tile
constexpr int kJoinedFeatures = 64;  ///< of a tile
constexpr int kJoinedReduction = 64;

/// One of the products of BF16 rows by a weight.
struct JoinedProduct {
  CUtensorMap rows;    ///< boxes of kJoinedRows by kJoinedReduction
  CUtensorMap weight;  ///< boxes of 64 by 64
  int reduction;
  int features;
  void* y;  ///< [num_rows, features]; unused where all are summed
};

/// Products whose tiles are neighbours, or summands of the same tiles.
struct JoinedProducts {
  JoinedProduct products[kMostJoined];
  int first_tile[kMostJoined + 1];  ///< of features
  int count;
  int64_t num_rows;
  const void* addend;  ///< or null, of a sum
  void* sum;
};

/// The gradient of a weight, the sum over rows of the products of two of their columns.
struct JoinedGradient {
  CUtensorMap grad;  ///< boxes of 64 by 64
  int features;
  float* sums;  ///< [features, width]
};

struct JoinedGradients {
  JoinedGradient gradients[kMostJoined];
  int first_tile[kMostJoined + 1];  ///< of features
  int count;
  CUtensorMap x;  ///< boxes of 64 by 64
  int num_rows;
  int width;
  bool accumulate;  ///< whether sums are added to
};

/// sums_i = grad_iᵀ · x, or added to them. REQUIRES features and a width that are multiples of 8.
void launch_joined_gradients(const JoinedGradients& gradients, cudaStream_t stream);

/// y_i = rows_i · weight_iᵀ, weights [features, reduction]. REQUIRES features that are multiples of
/// 8.
void launch_joined_products(const JoinedProducts& products, cudaStream_t stream);
/// sum = (addend + rows_0 · weight_0) + rows_1 · weight_1 + ..., rounded after each, weights
/// [reduction, features]. REQUIRES the same.
void launch_summed_products(const JoinedProducts& products, cudaStream_t stream);

}  // namespace tessera::cuda
