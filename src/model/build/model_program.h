#pragma once

#include <string_view>
#include <vector>

#include "model/build/ports.h"
#include "model/build/weight_placement.h"
#include "program/differentiate.h"

namespace tessera {

/// A program of the model before it is compiled, the ports by which it is bound
/// (model/build/ports.h says what each is) and where its weights lie.
struct ModelProgram {
  Program forward;
  WeightPlacements placements = {};
  PortMap ports = {};
  /// Accumulators that the forward program itself adds to: weight → accumulator.
  std::vector<Link> accumulators = {};

  bool has(Port port) const { return ports.has(port); }
  ValueId at(Port port) const { return ports.at(port); }
};

/// The program's weights that training leaves as they are.
std::vector<ValueId> frozen_weights(const ModelProgram& program);

/// What a layer of multi-token prediction calls the norm of the head that reads the same states
/// (ModelConfig::mtp_normed). It is no weight of the layer's own, but head_norm_name's.
inline constexpr std::string_view kPreviousNorm = "previous_norm.weight";
/// A layer's table of the experts of token ids, F32 [V, K] (MoeConfig::hash_layers).
inline constexpr std::string_view kHashTable = "moe.hash_table";
/// x times a factor, or x itself where that is 1.
ValueId add_scaled(Program& program, ValueId x, double factor, const char* name);

}  // namespace tessera
