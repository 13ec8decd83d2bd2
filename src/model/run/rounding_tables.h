#pragma once

#include <map>
#include <span>

#include "model/run/layer_binder.h"
#include "model/run/stage_programs.h"
#include "model/weights/rounding_history.h"

namespace tessera {

/// What the delayed roundings of a rank's layers read and count in a step: the scales, which stay
/// as they are from its beginning to its end, and the tallies of all its micro-batches. Of recipes
/// without delayed scales it is empty, and takes nothing.
class RoundingTables {
 public:
  /// Takes the memory. `programs` must outlive it.
  explicit RoundingTables(const StagePrograms& programs);
  /// Of the device's memory.
  static int64_t count_bytes(const StagePrograms& programs);

  /// What a layer's programs are bound to, counted in the model.
  CopyTensors of_layer(int64_t layer) const;
  /// The scales that hold from the next begin_step() on; of other ranks' layers nothing happens.
  /// REQUIRES that the device has begun the step before.
  void set_scales(int64_t layer, std::span<const float> scales);
  /// Brings the scales and clears the tallies, after all work given before.
  void begin_step();
  /// Copies the tallies to where the host reaches them, after all work given before.
  void publish();
  /// Adds to `tally` what was published last of a layer, once the device was synchronised; nothing
  /// of other ranks' layers.
  void read(int64_t layer, LayerTally& tally) const;

 private:
  struct Place {
    int64_t num_rows = 0;
    int64_t scales = 0;  ///< bytes into those of all layers
    int64_t tally = 0;
  };
  struct Sizes {
    std::map<int64_t, Place> places;
    int64_t scales = 0;
    int64_t tallies = 0;
  };
  static Sizes lay_out(const StagePrograms& programs);

  Device& device_;
  Sizes sizes_;
  Buffer scales_, tallies_;
  Buffer host_scales_, host_tallies_;
};

}  // namespace tessera
