#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/layers/block_program.h"
#include "train/bench/bench_step.h"

namespace tessera {

struct LayerBenchRequest {
  Settings settings;
  LayerBlock block = LayerBlock::kMoe;
  int64_t runs = 5;
  int64_t warmup = 2;
};

/// What one block of one layer took on one rank, for one micro-batch of random hidden states.
struct LayerBenchResult {
  /// One program, run to its end.
  struct Pass {
    std::vector<double> seconds;  ///< of each run, ascending
    double flops = 0;             ///< without those of what train.recompute computes again
    double median() const { return median_of_sorted(seconds); }
    double rate() const { return flops / median(); }  ///< FLOP/s
    /// Seconds by operator in one more run.
    std::map<std::string, double> operators;
  };
  std::string device;
  int64_t tokens = 0;
  double matrix_peak = 0;  ///< FLOP/s of large products in the same run (train/setup/matrix_peak.h)
  Pass forward, backward;
  int64_t saved_bytes = 0;      ///< what the forward pass keeps for the backward pass
  int64_t transient_bytes = 0;  ///< working memory of the two, one after the other
  /// Assignments to each expert, of an MoE block.
  std::vector<double> expert_load;
};

/// The first layer of the model that has the block. Throws UserError where none has.
int64_t find_layer(const ModelConfig& config, LayerBlock block);

/// Times a block of the first layer that has it, forward and backward, with initial weights; the
/// backward pass gives the gradients of the hidden state and, written rather than added to others,
/// of all weights. On a GPU each pass
/// begins with none of its data in the cache. Throws UserError as training would, and where no
/// layer has the block.
LayerBenchResult bench_layer(const LayerBenchRequest& request);

}  // namespace tessera
