#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/grouped_matmul/grouped_tile_model.h"
#include "train/setup/settings.h"

namespace tessera {

/// One grouped product of a layer's experts, and what the cost model says of ways to cut it.
struct ProductTiles {
  /// Tiles of at most this many rows.
  struct Choice {
    int max_rows = 0;
    cuda::TilePrediction tiles;
    double seconds = 0;
  };
  std::string name;          ///< "FC1", "FC2 data gradient", ...
  std::string expert_sizes;  ///< rows of each expert's part of the weight: "128x1536"
  int64_t width = 0;         ///< columns of the weight
  bool by_rows = false;      ///< y = a · W_eᵀ: the expert's size is y's width, else a's
  double flops = 0;          ///< of all experts' rows
  /// The kernels' own first; none where the product does not run in tiles.
  std::vector<Choice> choices;
  /// The kernels' own where the product's rows are gathered (moe.fuse_gather), as they may be where
  /// it reads tokens or their gradients in the experts' order.
  std::optional<Choice> gathered = {};
};

/// The grouped products of one MoE layer in the order of a step, with every expert as many tokens
/// as any other.
struct LayerTiles {
  int64_t tokens = 0;
  std::vector<int64_t> rows_of;  ///< of each expert
  std::vector<ProductTiles> products;
};

/// A prediction for the GPU that the model was fitted on, which need not be there: products,
/// forward and for the gradients of their inputs, of one micro-batch on one rank. Throws UserError
/// where the settings have no grouped products in BF16 or compute on the host.
LayerTiles predict_layer_tiles(const Settings& settings);

}  // namespace tessera
