#pragma once

#include "model/layer_program.h"

namespace tessera {

/// What the blocks of a layer share while it is built.
struct LayerBuilder {
  const ModelConfig& config;
  const BatchShape& shape;
  LayerProgram& layer;

  Program& program() { return layer.forward; }
  ValueId matrix(const std::string& name, int64_t rows, int64_t columns) {
    return program().add_weight(name, {shape.dtype, {rows, columns}});
  }
  ValueId vector(const std::string& name, int64_t size) {
    return program().add_weight(name, {DType::kF32, {size}});
  }
};

/// The dense MLP with weights "<name>.gate_up" (or ".up") and "<name>.down".
ValueId build_mlp(LayerBuilder& builder, const std::string& name, ValueId normed,
                  int64_t inner_size);

/// Router, routed experts and shared expert; sets the layer's MoE values.
ValueId build_moe(LayerBuilder& builder, ValueId normed);

}  // namespace tessera
