#pragma once

#include "core/memory.h"
#include "model/run/layer_binder.h"
#include "model/run/stage_programs.h"

namespace tessera {

/// The copies of weights that a rank's layers read (OperandRounding::keeps_copies), made anew when
/// weights may have changed. All micro-batches share them.
class LayerCopies {
 public:
  /// Takes the memory. `programs` must outlive it.
  explicit LayerCopies(const StagePrograms& programs);
  static int64_t count_bytes(const StagePrograms& programs);

  /// Those of a layer, counted in the model.
  const CopyTensors& of_layer(int64_t layer) const { return layers_.at(layer).tensors; }
  /// The weights may have changed: nothing is up to date.
  void forget();
  /// Whether the layer has copies that are not up to date; from now on they count as such.
  bool take_turn(int64_t layer);

 private:
  struct Layer {
    CopyTensors tensors;
    bool is_stale = true;
  };
  Buffer memory_;
  std::map<int64_t, Layer> layers_;
};

}  // namespace tessera
