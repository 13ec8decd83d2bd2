#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "core/memory.h"
#include "core/slice.h"
#include "model/build/ports.h"
#include "program/rounding/delayed_roundings.h"

namespace tessera {

/// What roundings by delayed scales saw of a layer's operands in a step, on one rank or on all:
/// by row (operand_row), as TallyColumn has it.
struct LayerTally {
  std::vector<int64_t> amax;  ///< bits of F32
  std::vector<int64_t> values, saturated, nonfinite;

  explicit LayerTally(int64_t num_rows = 0)
      : amax(num_rows), values(num_rows), saturated(num_rows), nonfinite(num_rows) {}
};

/// The largest values of each operand of each layer in the steps before, from which its scale
/// follows: state of a training, the same on all ranks. Source: Transformer Engine's DelayedScaling
/// (transformer_engine/common/recipe), whose scales are not rounded up to powers of two.
class RoundingHistory {
 public:
  /// Without layers where the recipe of `shape` has no delayed scales. The device reaches it too.
  RoundingHistory(const ModelConfig& config, const BatchShape& shape, Device& device);
  /// Its bytes.
  static int64_t count_bytes(const ModelConfig& config, const BatchShape& shape);

  struct Layer {
    int64_t number = 0;                ///< counted in the model
    std::vector<std::string> weights;  ///< operand_weights()
    OwnedTensor amax;                  ///< F32 [rows, steps], the newest step first; 0: unknown

    int64_t num_rows() const { return amax.get().shape[0]; }
  };
  std::span<const Layer> layers() const { return layers_; }
  bool is_empty() const { return layers_.empty(); }
  const DelayedScaling& scaling() const { return scaling_; }

  /// Names and tensors as checkpoints have them: "layers.3.rounding.amax".
  std::vector<NamedSlice> slices() const;
  static bool names(std::string_view tensor);
  /// Takes the newest steps of another history of the same model, F32 [rows, any number of steps].
  static void copy_newest(const Tensor& from, const Tensor& to);
  void clear();

  /// The scale of each operand of a layer in the next step; 0 where nothing is known.
  std::vector<float> scales(const Layer& layer) const;
  /// Adds a step, one tally for each layer; of a step that was skipped only those operands whose
  /// values saturated, which may be why.
  void add(std::span<const LayerTally> tallies, bool skipped);

 private:
  DelayedScaling scaling_;
  std::vector<Layer> layers_;
  std::vector<std::string> names_;
};

/// What a user should know of a layer's roundings: of each kind of operand the largest share of an
/// operand's values.
struct RoundingCounts {
  int64_t layer = 0;
  std::array<double, kOperandKinds> saturated = {};  ///< by OperandKind
  std::array<double, kOperandKinds> nonfinite = {};

  double most_nonfinite() const;
};
RoundingCounts count_roundings(int64_t layer, const LayerTally& tally);

}  // namespace tessera
