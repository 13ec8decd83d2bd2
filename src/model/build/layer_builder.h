#pragma once

#include <string>

#include "model/build/model_program.h"
#include "ops/linear/linear.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "parallel/stage_groups.h"

namespace tessera {

/// Where a matrix's adapter lies.
struct LinearAdapter {
  WeightPlacement down;  ///< A [r, in]
  WeightPlacement up;    ///< B [out, r]
};

/// What the blocks of a layer share while it is built. Blocks take and give this rank's own tokens
/// [T_l, ...]; within one, gather_tokens gives the tokens of the tensor-parallel group [T_g, ...].
struct LayerBuilder {
  const ModelConfig& config;  ///< ModelConfig::of_layer of the kind
  LayerKind kind;
  const BatchShape& shape;
  const StageGroups& groups;
  ModelProgram& layer;
  std::optional<CacheShape> cache = std::nullopt;
  std::vector<ValueId> adapted_sums = {};  ///< of products and what their adapters add

  Program& program() { return layer.forward; }
  PortContext context() const {
    return {.config = config, .kind = kind, .shape = shape, .groups = groups, .cache = cache};
  }
  /// The layer's value of a port that is no output.
  ValueId port(Port port) { return add_port(layer.forward, layer.ports, port, context()); }
  /// Whether the tokens are of several sequences that go on, each with states in a slot.
  bool has_slots() const { return cache && cache->is_paged(); }
  /// Adds what says whose tokens they are, and where the states are.
  void add_slots(std::vector<ValueId>& inputs) {
    for (const Port of_slots : {Port::kCuSeqlens, Port::kCacheLength, Port::kCacheSlots})
      inputs.push_back(port(of_slots));
  }
  int64_t tp() const { return groups.tp->size(); }
  int64_t tp_rank() const { return groups.tp->rank(); }

  /// A weight matrix [rows, columns] of which this rank holds a part: one matrix, unless the
  /// placement says of which it consists. A single row is a vector.
  ValueId matrix(const std::string& name, WeightPlacement placement) {
    const int64_t rows = placement.slice.global[0];
    if (placement.matrix_rows.empty() && rows > 1) placement.matrix_rows = {rows};
    return weight(name, shape.dtype, std::move(placement));
  }
  /// The same in F32: a vector, or the router.
  ValueId f32_weight(const std::string& name, WeightPlacement placement) {
    return weight(name, DType::kF32, std::move(placement));
  }
  /// A number or a vector in F32 that is loaded and saved, and never trained.
  ValueId constant(const std::string& name, WeightPlacement placement) {
    placement.frozen = true;
    return add_weight(name, DType::kF32, std::move(placement));
  }
  /// A matrix likewise, of the model's storage type.
  ValueId constant_matrix(const std::string& name, WeightPlacement placement) {
    placement.frozen = true;
    return add_weight(name, shape.dtype, std::move(placement));
  }
  /// A matrix of an adapter: the only weights that are trained where there are any.
  ValueId adapter(const std::string& name, WeightPlacement placement) {
    placement.matrix_rows = {placement.slice.global[0]};
    return add_weight(name, shape.dtype, std::move(placement));
  }
  /// A weight that every rank of the stage holds whole.
  WeightPlacement whole(const Shape& global) const {
    return {.slice = Slice::whole(global), .tp_copies = tp()};
  }
  /// The `part`-th of `parts` equal runs of rows, for column-parallel products: W of x · Wᵀ.
  static Slice row_share(const Shape& global, int64_t part, int64_t parts) {
    const int64_t count = global[0] / parts;
    return Slice::of_rows(global, {{part * count, count}});
  }
  /// This rank's of them, of what is made for all heads.
  WeightPlacement head_rows(const Shape& global) const {
    return {.slice = row_share(global, tp_rank(), tp()), .tp_copies = 1};
  }

  /// x · weightᵀ with the whole weight "<name>.weight" [width, width of x] and, where `bias`,
  /// "<name>.bias".
  ValueId linear(const std::string& name, ValueId x, int64_t width, bool bias,
                 const std::string& result);
  /// The same with the rows `rows` of the weight [width, ...]: column-parallel. `matrix_rows` as
  /// WeightPlacement's, where the weight is not one matrix.
  ValueId column_linear(const std::string& name, ValueId x, const Slice& rows, int64_t copies,
                        bool bias, const std::string& result,
                        std::vector<int64_t> matrix_rows = {});
  /// x [T_g, share of `inner`] · weight [width, inner]ᵀ, summed over the tensor-parallel group;
  /// each rank keeps its own tokens: row-parallel.
  ValueId row_linear(const std::string& name, ValueId x, int64_t inner, int64_t width, bool bias,
                     const std::string& result);
  /// What adapters have between their matrices, times LoraConfig::scale().
  ValueId scaled_low(ValueId low, const std::string& result);
  /// Makes residual sums a + (W x + B A x) into (a + W x) + B A x: both products take an addend
  /// then, and with zeros in B the bits are those of a + W x.
  void sum_residuals_first();
  /// The norm of hidden states x [.., hidden_size] with weights "<name>.weight" and, of a
  /// LayerNorm, "<name>.bias".
  ValueId state_norm(const std::string& name, ValueId x);
  /// RMSNorm with weight "<name>.weight" [size]: of whole rows of x, or of each head of that size.
  ValueId norm(const std::string& name, ValueId x, int64_t size, double eps);
  /// This rank's tokens to those of its tensor-parallel group.
  ValueId gather_tokens(ValueId x, const std::string& name);

 private:
  /// y and what the adapter of `name` adds to it.
  ValueId adapted(const std::string& name, ValueId x, ValueId y, const LinearAdapter& matrices,
                  const std::string& result);
  ValueId add_weight(const std::string& name, DType dtype, WeightPlacement placement);
  ValueId weight(const std::string& name, DType dtype, WeightPlacement placement) {
    placement.frozen = config.lora.is_on();
    return add_weight(name, dtype, std::move(placement));
  }
};

/// Refuses models and micro-batches that the groups cannot share, with the nearest choices.
void check_shares(const ModelConfig& config, const BatchShape& shape, const StageGroups& groups);

}  // namespace tessera
