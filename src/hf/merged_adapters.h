#pragma once

#include <memory>

#include "hf/transfer/transfer.h"
#include "model/config/config.h"

namespace tessera {

/// The tensors of a checkpoint of `model` with its low-rank adapters merged, numbered as in
/// `map.own`, which has none of these: W + scale · B A, F32, where a matrix has an adapter, and
/// what the checkpoint has elsewhere. Throws UserError where the checkpoint lacks an adapter's
/// matrix. Map and reader must outlive it.
std::unique_ptr<ElementSource> make_merged_source(const TensorMap& map,
                                                  const CheckpointReader& reader,
                                                  const ModelConfig& model);

/// The same of a model in memory.
std::unique_ptr<ElementSource> make_merged_source(const TensorMap& map, const HeldTensors& tensors,
                                                  const ModelConfig& model);

}  // namespace tessera
