#pragma once

#include <string>

#include "model/layer_program.h"
#include "ops/linear/linear.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace tessera {

/// What the blocks of a layer share while it is built.
struct LayerBuilder {
  const ModelConfig& config;
  LayerKind kind;
  const BatchShape& shape;
  LayerProgram& layer;

  Program& program() { return layer.forward; }
  ValueId matrix(const std::string& name, int64_t rows, int64_t columns) {
    return program().add_weight(name, {shape.dtype, {rows, columns}});
  }
  ValueId vector(const std::string& name, int64_t size) {
    return program().add_weight(name, {DType::kF32, {size}});
  }

  /// x · weightᵀ with weight "<name>.weight" [width, width of x] and, where `bias`, "<name>.bias".
  ValueId linear(const std::string& name, ValueId x, int64_t width, bool bias,
                 const std::string& result) {
    std::vector<ValueId> inputs = {x,
                                   matrix(name + ".weight", width, program().type(x).shape.last())};
    if (bias) inputs.push_back(vector(name + ".bias", width));
    return program().add1(make_linear(bias), inputs, result);
  }

  /// RMSNorm with weight "<name>.weight" [size]: of whole rows of x, or of each head of that size.
  ValueId norm(const std::string& name, ValueId x, int64_t size, double eps) {
    const ValueId weight = vector(name + ".weight", size);
    return program().add(make_rmsnorm(eps), {x, weight}, {name, name + ".rstd"})[0];
  }
};

}  // namespace tessera
